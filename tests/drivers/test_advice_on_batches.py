"""What errors about rows, and about what a model holds, say to do gives the plain model's numbers."""

import copy
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import (
    MicroBatches,
    PipelineDriver1F1B,
    PippyError,
    Replicate,
    TensorChunkSpec,
    pipe_split,
    pipeline,
)
from pippy.drivers.base.errors import StepError
from pippy.errors import MicrobatchError
from pippy.ir.base.errors import InputError
from tests.comparisons import Beside

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


@dataclass(frozen=True)
class Script:
    """What a user wrote: a model, a loss function, and the arguments of a step; ``plain`` ones for the plain model.

    ``example`` are example arguments, or True for those of the step.
    """

    model: Any
    loss: Any
    inputs: tuple[Any, ...]
    chunks: int = 2
    example: Any = None
    plain: tuple[Any, ...] | None = None
    driver: dict[str, Any] = field(default_factory=dict)

    def run(self, threads: Any) -> None:
        """Run a step, and compare the loss and all gradients with the plain model's."""
        torch.manual_seed(0)
        example = self.inputs if self.example is True else self.example
        both = Beside(threads, self.model(), self.loss, pipe={"example_args": example}, **self.driver)
        try:
            both.step(self.chunks, *self.inputs, plain=self.plain)
        finally:
            both.driver.close()


class Graph(nn.Module):
    """Each node adds up the rows of its neighbours."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x, edge_index):
        x = self.first(x)
        x = x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        pipe_split()
        return self.last(x)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, images):
        x = torch.stack([self.conv(each[None])[0].mean((1, 2)) for each in images])
        pipe_split()
        return self.head(x)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 6)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        pipe_split()
        return self.last(x).log_softmax(-1)


def ctc(output, target):
    return F.ctc_loss(output.transpose(0, 1), target[0], torch.full((len(output),), output.shape[1]), target[1])


class Recurrent(nn.Module):
    """Sequences are along the first dimension, as by default in torch."""

    def __init__(self):
        super().__init__()
        self.gru, self.last = nn.GRU(3, 5), nn.Linear(5, 4)

    def forward(self, x):
        x = self.gru(x)[0]
        pipe_split()
        return self.last(x[-1])


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5, bias=False), nn.Linear(5, 4, bias=False)

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.pooled(self.last(x))

    def pooled(self, x):
        return x.sum(1)


class Ragged(Padded):
    def pooled(self, x):
        return super().pooled(torch.nested.to_padded_tensor(x, 0.0))


class Held(nn.Module):
    """Multiplies by parameters that it keeps in a container, or calls layers that it keeps so."""

    def __init__(self, keep, make, use):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(3, 3), nn.Linear(3, 4), use
        self.held = keep([make(), make()])

    def forward(self, x):
        x = torch.tanh(self.first(x))
        pipe_split()
        for key in self.held.keys() if hasattr(self.held, "keys") else range(2):
            x = self.use(x, self.held[key])
        return self.last(x)


def scaled(keep):
    return lambda: Held(keep, lambda: nn.Parameter(torch.randn(3)), torch.mul)


def layered(keep):
    return lambda: Held(keep, lambda: nn.Linear(3, 3), lambda x, layer: layer(x))


def by_name(kind):
    return lambda items: kind(dict(zip("ab", items)))


class Tags(Recurrent):
    """A tag for each element of a sequence."""

    def forward(self, x):
        x = self.gru(x)[0]
        pipe_split()
        return self.last(x)


def of_tags(o, t):
    return F.cross_entropy(o.flatten(0, 1), t.flatten())


class Asks(nn.Module):
    """Asks how many rows there are, of an input or of a hidden value, and goes on differently."""

    def __init__(self, of_input, ask):
        super().__init__()
        self.first, self.last, self.of_input, self.ask = nn.Linear(3, 5), nn.Linear(5, 4), of_input, ask

    def forward(self, x):
        h = torch.tanh(self.first(x))
        pipe_split()
        return self.last(self.ask(h, len(x) if self.of_input else h.shape[0]))


torch.manual_seed(0)
ROWS, LABELS = torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 4, (6,))
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [5, 4, 3, 2, 1, 0, 3, 5]])
IMAGES = [torch.randn(3, 6 + size, 5, dtype=torch.float64) for size in range(6)]
SOUNDS, LENGTHS = torch.randn(6, 10, 3, dtype=torch.float64), torch.tensor([2, 3, 1, 4, 2, 3])
LETTERS = torch.randint(1, 6, (15,))
PADDED = nn.utils.rnn.pad_sequence(LETTERS.split(LENGTHS.tolist()), batch_first=True)
LONG, SQUARE = torch.randn(5, 6, 3, dtype=torch.float64), torch.randn(6, 6, 3, dtype=torch.float64)
PARTS = [torch.randn(size + 1, 3, dtype=torch.float64) for size in range(6)]
STRIDED, JAGGED = [torch.nested.nested_tensor(PARTS, layout=layout) for layout in (torch.strided, torch.jagged)]

graph = Script(Graph, F.cross_entropy, (ROWS, EDGES, LABELS))
images = Script(Images, F.cross_entropy, (IMAGES, LABELS), example=True)
three = replace(images, inputs=(IMAGES[:3], LABELS[:3]), chunks=3)
speech = Script(Speech, ctc, (SOUNDS, (LETTERS, LENGTHS)))
long, square = [Script(Recurrent, F.cross_entropy, (x, LABELS)) for x in (LONG, SQUARE)]
tags = Script(Tags, of_tags, (SQUARE, torch.randint(0, 4, (6, 6))))
ragged = Script(Ragged, F.cross_entropy, (JAGGED, LABELS))
strided = replace(ragged, inputs=(STRIDED, LABELS))
pieces = replace(
    images,
    inputs=(MicroBatches([IMAGES[:3], IMAGES[3:]], dim=None), LABELS),
    example=(IMAGES[:3], LABELS[:3]),
    plain=images.inputs,
)
padded = replace(ragged, model=Padded, inputs=(torch.nested.to_padded_tensor(JAGGED, 0.0), LABELS))
held = Script(scaled(list), F.cross_entropy, (ROWS, LABELS))


def spec(script, **specs):
    return replace(script, driver={"chunk_spec": specs})


def whole(script, **changes):
    return replace(script, chunks=1, **changes)


ONE = "rows cannot be cut apart: run one micro-batch, chunks=1"
ADVICE = [
    ("edges of a graph", graph, ONE, [whole(graph)]),
    ("edges, replicated as was said", spec(graph, edge_index=Replicate()), ONE, [whole(graph)]),
    ("a list of images", images, "dim=None), of a Pipe whose example has one piece; or", [pieces, whole(images)]),
    ("images, replicated", spec(images, images=Replicate()), ONE, [whole(images)]),
    ("images with as many channels as rows", three, ONE, [whole(three)]),
    (
        "targets one after the other",
        speech,
        "Give a tensor of two dimensions, padded",
        [replace(speech, inputs=(SOUNDS, (PADDED, LENGTHS))), whole(speech)],
    ),
    ("targets, replicated", spec(speech, target=(Replicate(), None)), ONE, [whole(speech)]),
    (
        "sequences first",
        long,
        "along dimension 1: chunk_spec={'x': TensorChunkSpec(1)}",
        [spec(long, x=TensorChunkSpec(1))],
    ),
    (
        "sequences first, as long as there are rows",
        square,
        "which is as long: chunk_spec={'x': TensorChunkSpec(1)}",
        [spec(square, x=TensorChunkSpec(1)), whole(square)],
    ),
    (
        "sequences first, and tags of their elements",
        tags,
        "which is as long: chunk_spec={'x': TensorChunkSpec(1)}",
        [spec(tags, x=TensorChunkSpec(1), target=TensorChunkSpec(1)), whole(tags)],
    ),
    ("a nested tensor", strided, "layout=torch.jagged), or pad it", [ragged, padded]),
    (
        "nested tensors in pieces",
        replace(strided, inputs=(MicroBatches([STRIDED, STRIDED]), LABELS)),
        "layout=torch.jagged)",
        [
            replace(
                ragged,
                inputs=(
                    MicroBatches(
                        [torch.nested.as_nested_tensor(PARTS[i : i + 3], layout=torch.jagged) for i in (0, 3)]
                    ),
                    LABELS,
                ),
                plain=ragged.inputs,
            )
        ],
    ),
    (
        "an example with a nested tensor",
        replace(ragged, example=True),
        "pad it (torch.nested.to_padded_tensor), or leave the example out",
        [replace(padded, example=True), ragged],
    ),
    ("a list of parameters", held, "make held an nn.ParameterList", [replace(held, model=scaled(nn.ParameterList))]),
    (
        "a dict of parameters",
        replace(held, model=scaled(by_name(dict))),
        "or an nn.ParameterDict if it has keys",
        [replace(held, model=scaled(by_name(nn.ParameterDict)))],
    ),
    (
        "a list of layers",
        replace(held, model=layered(list)),
        "nn.ModuleList",
        [replace(held, model=layered(nn.ModuleList))],
    ),
]


@pytest.mark.parametrize(("script", "words", "advised"), [row[1:] for row in ADVICE], ids=[row[0] for row in ADVICE])
@pytest.mark.filterwarnings("ignore:the first step was not checked")
def test_advice(script, words, advised, threads):
    with pytest.raises(PippyError) as caught:
        script.run(threads)
    assert words in str(caught.value)
    for each in advised:
        each.run(threads)


QUESTIONS = {
    "a branch": lambda h, rows: h * 2 if rows > 4 else h,
    "the largest": lambda h, rows: h + h.topk(min(5, rows), 0).values.mean(),
    "a loop": lambda h, rows: torch.stack([h[row] * row for row in range(rows)]),
    "a number": lambda h, rows: h / int(rows),
}
ASKING = [
    (f"{name}, of {'an input' * of_input or 'a value'}", of_input, ask)
    for name, ask in QUESTIONS.items()
    for of_input in (True, False)
]


@pytest.mark.parametrize(("of_input", "ask"), [row[1:] for row in ASKING], ids=[row[0] for row in ASKING])
@pytest.mark.parametrize("rows", [6, 5])
def test_forward_that_depends_on_the_number_of_rows(of_input, ask, rows, threads):
    """Another graph would make micro-batches run, each of which goes on in another way than the whole."""
    script = Script(lambda: Asks(of_input, ask), F.cross_entropy, (ROWS, LABELS), example=(ROWS[:rows], LABELS[:rows]))
    with pytest.raises(PippyError) as caught:
        replace(script, chunks=4, driver={"check": False}).run(threads)
    assert "forward depends on the number of rows" in str(caught.value)
    assert "What to do: run one micro-batch, chunks=1" in str(caught.value).splitlines()
    replace(script, chunks=1).run(threads)


class Modes(Asks):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.0, self.training)


@pytest.mark.parametrize("training", [True, False])
def test_what_is_found_of_rows_is_no_difference_between_modes(training, threads):
    model = Modes(False, QUESTIONS["a branch"])
    pipe = pipeline(model.train(not training), F.cross_entropy, example_args=(ROWS, LABELS)).train(training)
    driver = PipelineDriver1F1B(pipe, threads)
    torch.testing.assert_close(driver.run(1, ROWS, LABELS), F.cross_entropy(model(ROWS), LABELS).detach())


class Lengths(Speech):
    def forward(self, x):
        return super().forward(x if x.shape[1] > 4 else -x).mean(1)


def test_another_length_is_no_matter_of_rows(threads):
    """Another graph has it, also in several micro-batches, and without a check."""
    for driver in ({}, {"check": False}):
        example = (SOUNDS[:, :3], LABELS)
        Script(Lengths, F.cross_entropy, (SOUNDS, LABELS), example=example, driver=driver).run(threads)


class Bag(nn.Module):
    def __init__(self, padding_idx=None):
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(20, 4, padding_idx=padding_idx), nn.Linear(4, 3)

    def forward(self, text, offsets=None):
        x = self.bag(text, offsets)
        pipe_split()
        return self.last(x)


def test_a_flat_text_with_offsets(threads):
    """A Replicate() was advised for the text."""
    text, offsets, target = torch.randint(1, 20, (12,)), torch.tensor([0, 3, 5, 9]), torch.tensor([0, 1, 2, 0])
    loss, plain = nn.CrossEntropyLoss(), Bag()
    driver = Beside(threads, copy.deepcopy(plain), loss, pipe={"example_args": (text, offsets, target)}).driver
    with pytest.raises(MicrobatchError, match="a tensor of two dimensions, padded") as caught:
        driver.run(2, text, offsets, target)
    assert "Replicate()" not in str(caught.value)
    padded = nn.utils.rnn.pad_sequence(text.tensor_split(offsets[1:]), batch_first=True, padding_value=0)
    model = Bag(padding_idx=0)
    model.load_state_dict(plain.state_dict())
    both = Beside(threads, model, loss, plain=plain, pipe={"example_args": (padded, target)})
    both.step(2, padded, target, plain=(text, offsets, target))


# A driver refuses a call for which forward would do something else, before anything is sent.


X = torch.randn(6, 4, dtype=torch.float64)


class Fixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        if x.shape[0] > 3:
            x = x * 2
        x = self.second(self.first(x))
        pipe_split()
        return x.sum(1) if x.size(1) > 2 else x


def test_each_micro_batch_is_checked_before_anything_is_sent(threads):
    model = Fixes().double()
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss(), example_args=(X, X[:, 0])), threads)
    first = driver.run(1, X, X[:, 0])
    with pytest.raises(MicrobatchError, match=r"(?s)depends on the number of rows.*chunks=1"):
        driver.run(2, X, X[:, 0])  # micro-batches of three rows
    driver.copy_to(model)
    assert model.second.num_batches_tracked == 1
    more = torch.cat([X, X])
    assert torch.isfinite(driver.run(2, more, more[:, 0])) and torch.isfinite(first)
    driver.copy_to(model)
    assert model.second.num_batches_tracked == 3


def of_six(h, rows):
    assert rows == 6
    return h


@pytest.mark.parametrize(
    ("of_input", "error", "told"),
    [
        (True, InputError, "These are the sizes of micro-batch 0, which has rows 0 to 2 of 6"),
        (False, StepError, r"stage 1, micro-batch 0, rows 0 to 2 of 6\)"),
    ],
)
def test_rows_in_errors_are_those_of_the_call(of_input, error, told, threads):
    pipe = pipeline(Asks(of_input, of_six), F.cross_entropy, example_args=(ROWS, LABELS))
    driver = PipelineDriver1F1B(pipe, threads)
    with pytest.raises(error, match=told) as caught:
        driver.run(2, ROWS, LABELS)
    assert "forward depends on the number of rows" in str(caught.value)
    assert re.search(
        "What to do: make another Pipe .*, or run one micro-batch, chunks=1$", str(caught.value), re.MULTILINE
    )
    driver.run(1, ROWS, LABELS)


class Returns(Asks):
    def forward(self, x):
        return super().forward(x).pow(2).mean()


def test_a_loss_that_a_model_returns_and_nobody_was_told_of(threads):
    model = Returns(False, lambda h, rows: h)
    with pytest.raises(MicrobatchError, match=r"make the Pipe with pipeline\(..., output_loss_value_spec=True\)$"):
        PipelineDriver1F1B(pipeline(model), threads).run(2, ROWS)
    driver = PipelineDriver1F1B(pipeline(model, output_loss_value_spec=True), threads)
    driver.run(2, ROWS)
    assert driver.get_grad("first.weight").any()
