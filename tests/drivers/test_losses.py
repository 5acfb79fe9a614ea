"""Any loss, with any padding: a driver gives the plain model's numbers, or advice that does."""

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from exps.habits.losses import IGNORED
from exps.habits.losses import LOSSES as HABITS
from pippy import MicroBatches, PipelineDriver, PipelineDriver1F1B, PipelineDriverFillDrain, pipe_split, pipeline
from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.ir.base.trees import leaves
from tests.comparisons import Beside, assert_gradients

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

CLASSES = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(CLASSES, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        x = torch.relu(self.a(x))
        pipe_split()
        return self.b(x)


class Returning(Net):
    """Returns its loss."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x, target):
        return self.loss(super().forward(x), target)


class Own(nn.Module):
    """A loss module that pippy cannot read."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output, target):
        return self.loss(output, target)


@dataclass(frozen=True)
class Loss:
    """A loss of torch's: its function, its module, its options, and targets. ``padded`` has padding where a mask says."""

    function: Callable[..., Any]
    module: type[nn.Module]
    targets: Callable[[torch.Tensor], Any]
    options: dict[str, st.SearchStrategy[Any]]


def labels(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(CLASSES, x.shape[:1])


def probabilities(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape).softmax(-1)


def signs(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(2, x.shape) * 2.0 - 1


INDICES = st.sampled_from((IGNORED, 0, 2))
CLASS_WEIGHTS = st.sampled_from(
    (None, torch.tensor([0.5, 2.0, 0.25, 1.0], dtype=torch.float64), torch.tensor([0.0, 2, 1, 0], dtype=torch.float64))
)
ENTROPY = {"weight": CLASS_WEIGHTS, "ignore_index": INDICES, "label_smoothing": st.sampled_from((0.0, 0.2))}
SOFT = {"weight": CLASS_WEIGHTS, "label_smoothing": st.sampled_from((0.0, 0.2))}
LOSSES = {
    "cross entropy": Loss(F.cross_entropy, nn.CrossEntropyLoss, labels, ENTROPY),
    "cross entropy of probabilities": Loss(F.cross_entropy, nn.CrossEntropyLoss, probabilities, SOFT),
    "nll": Loss(F.nll_loss, nn.NLLLoss, labels, {"weight": CLASS_WEIGHTS, "ignore_index": INDICES}),
    "mse": Loss(F.mse_loss, nn.MSELoss, torch.randn_like, {}),
    "l1": Loss(F.l1_loss, nn.L1Loss, torch.randn_like, {}),
    "huber": Loss(F.huber_loss, nn.HuberLoss, torch.randn_like, {"delta": st.sampled_from((0.5, 1.0))}),
    "smooth l1": Loss(F.smooth_l1_loss, nn.SmoothL1Loss, torch.randn_like, {"beta": st.sampled_from((0.5, 1.0))}),
    "binary": Loss(
        F.binary_cross_entropy_with_logits,
        nn.BCEWithLogitsLoss,
        torch.rand_like,
        {"weight": CLASS_WEIGHTS, "pos_weight": CLASS_WEIGHTS},
    ),
    "kl": Loss(F.kl_div, nn.KLDivLoss, probabilities, {}),
    "poisson": Loss(F.poisson_nll_loss, nn.PoissonNLLLoss, torch.rand_like, {"full": st.booleans()}),
    "hinge": Loss(F.hinge_embedding_loss, nn.HingeEmbeddingLoss, signs, {}),
    "soft margin": Loss(F.soft_margin_loss, nn.SoftMarginLoss, signs, {}),
    "multi margin": Loss(F.multi_margin_loss, nn.MultiMarginLoss, labels, {"weight": CLASS_WEIGHTS}),
    "multilabel": Loss(
        F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss, torch.rand_like, {"weight": CLASS_WEIGHTS}
    ),
}


def words(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(CLASSES, x.shape[:-1])


def numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape[:-1])


def words_and_mask(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"words": words(x), "mask": torch.ones(x.shape[:2], dtype=torch.bool)}


def words_and_weights(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return words(x), torch.ones(x.shape[0])


def masked_words(output, target):
    losses = F.cross_entropy(output.transpose(1, 2), target["words"], reduction="none")
    return (losses * target["mask"]).sum() / target["mask"].sum()


def weighted_words(output, target):
    losses = F.cross_entropy(output.transpose(1, 2), target[0], reduction="none").mean(1)
    return (losses * target[1]).sum() / target[1].sum()


IN_CONTAINERS = {
    "masked words": (masked_words, words_and_mask),
    "weighted words": (weighted_words, words_and_weights),
}
FORMS = ("module", "function", "lambda", "own module", "returned")


@dataclass
class Case:
    """What is given to ``pipeline``, and the same in one function."""

    form: str
    given: Any
    plain: Callable[[Any, Any], Any]
    targets: Callable[[torch.Tensor], Any]
    pad: float | None
    words: tuple[int, ...] = ()

    def batch(self, rows: list[bool]) -> tuple[torch.Tensor, Any]:
        """An input and a target, which is padded in some rows: of the first tensor in it, and of the last."""
        x = torch.randn(len(rows), *self.words, CLASSES)
        target, padded = self.targets(x), torch.tensor(rows)
        tensors = list(leaves(target))
        if self.pad is not None:
            tensors[0][padded] = self.pad
        if len(tensors) > 1:
            tensors[-1][padded] = 0
        return x, target


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from((*LOSSES, *HABITS, *IN_CONTAINERS)))
    if name not in LOSSES:
        form, pad = draw(st.sampled_from(FORMS[2:])), draw(st.sampled_from((None, IGNORED)))
        if name in IN_CONTAINERS:
            own, targets = IN_CONTAINERS[name]
            return Case(form, given_as(form, own), own, targets, pad and 0, words=(3,))
        habit = HABITS[name]
        own, of_words = habit.function, draw(st.booleans()) if habit.tokens is None else habit.tokens
        targets, missing = (numbers, torch.nan) if habit.numbers else (words, IGNORED)
        return Case(form, given_as(form, own), own, targets, pad and missing, words=(3,) if of_words else ())
    loss, form = LOSSES[name], draw(st.sampled_from(FORMS))
    options = {key: draw(values) for key, values in loss.options.items()}
    options["reduction"] = draw(st.sampled_from(("mean", "sum", *(("batchmean",) * (name == "kl")))))
    plain = functools.partial(loss.function, **options)
    given = loss.module(**options) if form == "module" else given_as(form, plain)
    return Case(form, given, plain, loss.targets, options.get("ignore_index"))


def given_as(form: str, loss: Callable[[Any, Any], Any]) -> Any:
    return {
        "function": loss,
        "lambda": lambda output, target: loss(output, target),
        "own module": Own(loss),
        "returned": None,
    }[form]


class Checked:
    """A driver that is held to the plain model. Where it refuses a step, the next driver is made as the error says."""

    def __init__(self, case: Case, threads) -> None:
        self.case, self.workers = case, threads
        self.advice: str | None = None
        self.plain = Returning(case.plain) if case.form == "returned" else Net()
        self.driver = self.made(PipelineDriver1F1B)

    def made(self, kind, **options):
        model = copy.deepcopy(self.plain)
        if self.case.form == "returned":
            return kind(pipeline(model, output_loss_value_spec=True), self.workers, **options)
        return kind(pipeline(model, self.case.given), self.workers, **options)

    def step(self, chunks: int, x: torch.Tensor, target: Any) -> None:
        self.plain.zero_grad()
        returns = self.case.form == "returned"
        expected = self.plain(x, target) if returns else self.case.plain(self.plain(x), target)
        expected.backward()
        chunks = 1 if self.advice == "chunks=1" else chunks
        try:
            self.driver.zero_grad()
            loss = self.driver.run(chunks, x, target)
        except MicrobatchError as error:
            assert self.advice is None, f"{self.advice} was advised, and then {error}"
            assert all(gradient is None for gradient in self.driver.gradients().values()), "nothing is adopted"
            self.follow(str(error))
            loss = self.driver.run(1 if self.advice == "chunks=1" else chunks, x, target)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12, equal_nan=True)
        assert_gradients(self.driver, self.plain, rtol=1e-9, atol=1e-12, equal_nan=True)

    def follow(self, error: str) -> None:
        found = re.search(r"loss_reduction=(.*)$", error)
        self.driver.close()
        if found is not None:
            self.advice = found[1]
            self.driver = self.made(PipelineDriver1F1B, loss_reduction=eval(found[1]))
        elif "single_loss=True" in error:
            self.advice = "single_loss"
            self.driver = self.made(PipelineDriverFillDrain, single_loss=True)
        else:
            assert "chunks=1" in error
            self.advice, self.driver = "chunks=1", self.made(PipelineDriver1F1B)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    case=cases(),
    padding=st.lists(st.lists(st.booleans(), min_size=4, max_size=9), min_size=2, max_size=2),
    chunks=st.integers(2, 4),
    seed=st.integers(0, 3),
)
def test_any_loss_gives_the_plain_numbers_or_advice_that_does(threads, case, padding, chunks, seed):
    torch.manual_seed(seed)
    checked = Checked(case, threads)
    for rows in padding:
        checked.step(chunks, *case.batch(rows))
    checked.driver.close()


# A micro-batch of padding alone has no share in a step, though its loss is nan: in the loss, and in no gradient.


SCHEDULES = [
    "fill_drain",
    "1f1b",
    "eager_1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_min",
    "dualpipe_v",
]


class PaddedWords(nn.Module):
    """Four stages, and with ``returns`` the loss."""

    def __init__(self, returns=False):
        super().__init__()
        self.embed, self.head, self.returns = nn.Embedding(9, 6), nn.Linear(6, 9), returns
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, ids, labels=None):
        h = self.embed(ids)
        for layer in self.layers[:-1]:
            h = torch.tanh(layer(h))
            pipe_split()
        logits = self.head(self.layers[-1](h)).transpose(1, 2)
        return F.cross_entropy(logits, labels, ignore_index=0) if self.returns else logits


class Entropy(nn.Module):
    """A mean of what is no padding, written out: 0 / 0 for padding alone."""

    def forward(self, logits, labels):
        counts = labels != 0
        return (F.cross_entropy(logits, labels, reduction="none") * counts).sum() / counts.sum()


def selected(logits, labels):
    keep = labels != 0
    return F.cross_entropy(logits.transpose(1, 2)[keep], labels[keep])


def counted(target):
    return (target != 0).sum()


IDS, LABELS = torch.randint(1, 9, (7, 5)), torch.randint(1, 9, (7, 5))
LABELS[3:5] = 0  # the second of three micro-batches
LABELS[0, 3:] = 0
PADDED_LOSSES = {
    "a module of torch": (nn.CrossEntropyLoss(ignore_index=0), None),
    "a function": (lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=0), counted),
    "written out": (Entropy(), counted),
    "selected": (selected, counted),
    "of the model": (None, lambda *, labels: counted(labels)),
}


def step(threads, name, kind=None, **options):
    """A step without the check of the first one, beside the plain model's."""
    loss_fn, how = PADDED_LOSSES[name]
    model, pipe = PaddedWords(returns=loss_fn is None), {"output_loss_value_spec": None if loss_fn else True}
    both = Beside(threads, model, loss_fn, kind, pipe=pipe, check=False, loss_reduction=how, **options)
    try:
        both.step(3, IDS, LABELS)
        expected = loss_fn(both.plain(IDS), LABELS) if loss_fn else both.plain(IDS, LABELS)
        with torch.no_grad():
            torch.testing.assert_close(both.driver.run(3, IDS, LABELS), expected.detach())
    finally:
        both.driver.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PADDED_LOSSES)
def test_every_schedule(schedule, name, threads):
    alone = ("fill_drain", "1f1b", "eager_1f1b", "zb_h1", "zb_h2")  # one stage on each worker
    step(threads, name, schedule=schedule, world_size=4 if schedule in alone else 2)


# As inductor does, which takes seconds; on processes, since it switches the anomaly mode of all threads while it compiles.
COMPILED = {"compile": {"backend": "aot_eager"}}


@pytest.mark.parametrize("options", [{"out_of_order": True}, COMPILED, {"schedule": "zb_h1"} | COMPILED])
def test_other_ways_to_run(options, cluster):
    step(cluster, "written out", **options)


def test_one_loss_over_all(threads):
    step(threads, "a module of torch", PipelineDriverFillDrain, single_loss=True)


# Packed sequences: micro-batches of other numbers of tokens and documents take the plain model's step, on every schedule.


WORDS, WIDTH, LONGEST = 11, 8, 16
DOCUMENTS = [[3, 4], [7], [2, 2, 5, 1], [6, 3, 2]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Packed(nn.Module):
    """Reads documents one behind the other, [tokens], each of which sees itself alone."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, cu_seqlens):
        at = torch.arange(ids.shape[0], device=ids.device)
        document = torch.bucketize(at, cu_seqlens, right=True)
        mask = (document[:, None] == document[None, :]) & (at[:, None] >= at[None, :])
        x = self.words(ids) + self.places(at - cu_seqlens[document - 1])
        for number, block in enumerate(self.blocks):
            if number:
                pipe_split()
            x = block(x, mask)
        return self.head(x)


def packs():
    """For each micro-batch: ids, the first token of each document and the end, labels."""
    found = []
    for lengths in DOCUMENTS:
        ids = [torch.randint(WORDS, (length,)) for length in lengths]
        labels = [torch.cat([each[1:], torch.tensor([-100])]) for each in ids]
        found.append((torch.cat(ids), torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]), torch.cat(labels)))
    return found


@pytest.mark.parametrize("schedule", [name for name, entry in REGISTRY.items() if entry.training])
def test_documents_by_their_ends(threads, in_float64, schedule):
    model = Packed()
    plain, given = copy.deepcopy(model), packs()
    alone = [plain(ids[:3], torch.tensor([0, 3])) for ids, *_ in given[:1]]
    assert torch.allclose(plain(*given[0][:2])[:3], alone[0])  # documents do not see each other
    total = sum((labels >= 0).sum() for *_, labels in given)
    loss = sum(F.cross_entropy(plain(ids, ends), labels, reduction="sum") for ids, ends, labels in given) / total
    loss.backward()
    pipe = pipeline(model, nn.CrossEntropyLoss(), example_args=given[2])
    ids, ends, labels = (list(each) for each in zip(*given))
    driver = PipelineDriver(pipe, threads, world_size=2, schedule=schedule, check=False)
    made = driver.run(4, MicroBatches(ids), MicroBatches(ends, dim=None), MicroBatches(labels))
    assert torch.allclose(made, loss)
    assert_gradients(driver, plain)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_documents_by_their_positions_in_a_model_of_transformers(threads, in_float64, schedule):
    """A row for each micro-batch. The model returns its loss, a mean over labels: micro-batches count by these unasked."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=4,
                                      num_attention_heads=2, num_key_value_heads=1, use_cache=False)  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    plain, given = copy.deepcopy(model), []
    for (ids, _, labels), lengths in zip(packs(), DOCUMENTS):
        shifted = torch.cat([torch.tensor([-100]), labels[:-1]])  # the model shifts them
        positions = torch.cat([torch.arange(length) for length in lengths])
        given.append({"input_ids": ids[None], "position_ids": positions[None], "labels": shifted[None]})
    counts = [(each["labels"][:, 1:] >= 0).sum() for each in given]
    assert len({int(each) for each in counts}) > 1
    loss = sum(count * plain(**each).loss for count, each in zip(counts, given)) / sum(counts)
    loss.backward()
    pipe = pipeline(model, num_stages=4, split="parameters", example_kwargs=given[2])
    driver = PipelineDriver(pipe, threads, world_size=2, schedule=schedule)
    made = driver.run(4, outputs=False, **{name: MicroBatches([each[name] for each in given]) for name in given[0]})
    assert torch.allclose(made.double(), loss.double(), rtol=1e-6)  # it is made in float32
    assert_gradients(driver, plain, rtol=1e-5, atol=1e-8)
