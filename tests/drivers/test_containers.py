"""Arguments and values between stages: containers, opaque objects, own defaults, and the target's name."""

import copy
import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, fields

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from pippy import PipelineDriver1F1B, pipe_split, pipeline, verify
from pippy.drivers.base.errors import StepError
from pippy.drivers.protocol.steps import Step
from pippy.errors import InputError, PippyError, VerificationError
from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import children, leaves
from tests.comparisons import Beside, assert_gradients, assert_loss, assert_same_gradients
from tests.drivers.models import TwoLayers

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

Pair = namedtuple("Pair", "one other")


@dataclass
class Plain:
    one: object
    other: object = None


@dataclass
class ModelOutput(OrderedDict):
    """As those of transformers: fields that are items too, unless they are None."""

    loss: object = None
    logits: object = None
    hidden: object = None

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __getitem__(self, key):
        return OrderedDict.__getitem__(self, key) if isinstance(key, str) else tuple(self.values())[key]


class Model(nn.Module):
    """What is given is read in the first stage. What ``make`` makes there is read in the last, and ``end`` makes the output."""

    def __init__(self, read, make, end):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.read, self.make, self.end = read, make, end

    def forward(self, x, given):
        first, last = self.read(given)
        x = torch.tanh(self.layers[0](x)) + first
        crossing = self.make(x, first * 2)
        pipe_split()
        y = torch.tanh(self.layers[1](x))
        pipe_split()
        one, other = self.read(crossing)
        return self.end(self.layers[2](y) + one * other, last * x)


def unpacked(value):
    one, other = value
    return one, other


KINDS = {
    "dict of lists": (lambda a, b: {"a": [a, {"b": b}], "c": "text"}, lambda v: (v["a"][0], v["a"][1]["b"])),
    "named tuple": (Pair, lambda v: (v.one, v[1])),
    "unpacked": (Pair, lambda v: unpacked(v)),
    "OrderedDict": (lambda a, b: OrderedDict(a=a, n=None, b=b), lambda v: (v["a"], v["b"])),
    "dataclass": (lambda a, b: Plain((a, "text"), [None, b]), lambda v: (v.one[0], v.other[1])),
    "model output": (lambda a, b: ModelOutput(logits=a, hidden=(b, None)), lambda v: (v.logits, v["hidden"][0])),
    "its items": (lambda a, b: ModelOutput(logits=a, hidden=b), lambda v: (v[0], v[1])),
    "numbers": (lambda a, b: (a, 2, b, 0.5, True, None, "s"), lambda v: (v[0], v[2])),
}


def types(value):
    inside = children(value)
    return type(value) if inside is None else (type(value), [types(item) for item in inside])


def check_same(found, expected):
    assert types(found) == types(expected)
    for mine, plain in zip(leaves(found), leaves(expected), strict=True):
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine, plain.detach())
        else:
            assert mine == plain


def loss_of_tensors(output, target):
    return sum(F.mse_loss(each, target) for each in leaves(output) if isinstance(each, torch.Tensor))


@pytest.mark.parametrize("kind", KINDS)
def test_containers_in_between_and_out(threads, kind):
    x, one, other, target = torch.randn(4, 6, 4)
    make, read = KINDS[kind]
    model, given = Model(read, make, make), make(one, other)
    plain = copy.deepcopy(model)
    output = plain(x, given)
    pipe = pipeline(model, loss_of_tensors)
    assert_loss(pipe(x, given, target), loss_of_tensors(output, target))
    assert_same_gradients(pipe, plain)
    driver = PipelineDriver1F1B(pipe, threads, loss_reduction="mean")
    found, outputs = driver.run(2, x, given, target, outputs=True)
    torch.testing.assert_close(found, loss_of_tensors(output, target).detach())
    check_same(outputs, output)
    assert_gradients(driver, plain)


class OwnArguments(nn.Module):
    """Each stage has an argument of its own; one is a container of which two stages read a part."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, middle, scale, last):
        x = self.layers[0](x)
        pipe_split()
        x = self.layers[1](x) + middle
        pipe_split()
        return self.layers[2](x) * scale + last["bias"]


def test_an_argument_goes_straight_to_the_stages_that_use_it(threads, monkeypatch):
    model = OwnArguments()
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
    x, middle, bias, target = torch.randn(4, 6, 4)
    given, send = {}, threads.session.send

    def watched(worker, message):
        if isinstance(message.body, Step):
            given[worker] = set(message.body.inputs.arguments)
        return send(worker, message)

    monkeypatch.setattr(threads.session, "send", watched)
    loss = driver.run(3, x, middle, 0.5, {"bias": bias}, target)
    torch.testing.assert_close(loss, F.mse_loss(model(x, middle, 0.5, {"bias": bias}), target).detach())
    assert given == {0: {"x"}, 1: {"middle"}, 2: {"scale", "last", "target"}}


class Checked(namedtuple("Checked", "value rows")):
    """As torch's PackedSequence: the constructor looks at what it is given."""

    def __new__(cls, value, rows):
        assert rows["of"].device.type == "cpu"
        return super().__new__(cls, value, rows)


class Packing(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.last = nn.Linear(3, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(x), lengths, batch_first=True, enforce_sorted=False)
        checked = Checked(x, {"of": lengths})
        padded, counts = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=5)
        return self.last(padded.sum(1) / counts[:, None] + checked.value.sum() * 0)


@pytest.mark.parametrize("on", ["cluster", "threads"])
def test_named_tuples_that_check_what_they_hold(on, request):
    """They were made again around what stands for tensors, and a PackedSequence could not go from stage to stage."""
    given = torch.randn(4, 5, 3), torch.tensor([5, 2, 3, 1]), torch.randn(4, 2)
    pipe = {"example_args": given, "num_stages": 3}  # weighed by running it
    Beside(request.getfixturevalue(on), Packing(), pipe=pipe).step(2, *given)


# Objects that the pipeline takes for constants, with tensors somewhere inside of them.


class Box:
    """No container that the pipeline knows."""

    def __init__(self, value):
        self.held = value


class Slots:
    __slots__ = ("held",)

    def __init__(self, value):
        self.held = value


class Linked:
    """Refers to itself."""

    def __init__(self, value):
        self.me, self.held = self, value


PACKINGS = {
    "attribute": (Box, "held"),
    "list": (lambda value: Box([1, value]), r"held\[1\]"),
    "dict": (lambda value: Box({"a": (value,)}), r"held\['a'\]\[0\]"),
    "object": (lambda value: Box(Box(value)), r"held\.held"),
    "object in a list": (lambda value: Box([Box(value)]), r"held\[0\]\.held"),
    "slots": (Slots, "held"),
    "linked": (Linked, "held"),
}


@fx.wrap
def packed(value, kind):
    return PACKINGS[kind][0](value)


@fx.wrap
def first_tensor(value):
    while not isinstance(value, torch.Tensor):
        if isinstance(value, dict):
            value = value["a"]
        elif isinstance(value, (list, tuple)):
            value = value[-1]
        else:
            value = value.held
    return value


class Packs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        box = packed(self.first(x), self.kind)
        pipe_split()
        return self.last(first_tensor(box))


def loss_fn(output, target):
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize("kind", PACKINGS)
def test_a_tensor_inside_that_requires_a_gradient(kind, threads):
    pipe = pipeline(Packs(kind), loss_fn)
    given = torch.randn(4, 4), torch.randn(4, 4)
    message = rf"(?s)passes from stage to stage.*gradient, in.*{PACKINGS[kind][1]}.*dataclass"
    with pytest.raises(StageError, match=message):
        pipe(*given)
    driver = PipelineDriver1F1B(pipe, threads)
    with pytest.raises(StepError, match=message):
        driver.run(2, *given)


@pytest.mark.parametrize("kind", PACKINGS)
def test_no_gradient_no_objection(kind, threads):
    model, x = Packs(kind), torch.randn(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(pipeline(model)(x), model(x))


# An argument of forward whose default is an object of the user's own, for which forward asks by `is`.


X, MASK, TARGET = torch.randn(6, 4).double(), torch.rand(6, 4).double(), torch.randn(6, 4).double()


class Missing:
    """A class whose objects say that nothing is given."""


class Token(enum.Enum):
    MISSING = 0


def net(missing):
    class Net(TwoLayers):
        width = 4

        def forward(self, x, mask=missing):
            x = self.first(x)
            pipe_split()
            return self.last(x * 2 if mask is missing else x + 1)  # no operation on the mask would fail

    return Net()


EXAMPLES = {
    "no example": {},
    "an example without it": {"example_args": (X, TARGET)},
    "an example with it": {"example_args": (X, TARGET), "example_kwargs": {"mask": MASK}},
}


@pytest.mark.parametrize("missing", [object(), Missing(), Token.MISSING], ids=["object", "class", "enum"])
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_it_is_the_default_or_refused(missing, example, threads):
    """The Pipe refuses the other; a driver goes by another graph."""
    model = net(missing)
    pipe = pipeline(model, nn.MSELoss(), **example)
    driver = PipelineDriver1F1B(pipe, threads)
    fits = {"mask": MASK} if "example_kwargs" in example else {}
    for given in ({}, {"mask": missing}, {"mask": MASK}):
        expected = nn.functional.mse_loss(model(X, **given), TARGET).detach()
        torch.testing.assert_close(driver.run(2, X, target=TARGET, **given), expected)
        if ("mask" in given and given["mask"] is MASK) is bool(fits):
            torch.testing.assert_close(pipe(X, target=TARGET, **given), expected)
        else:
            with pytest.raises(InputError, match=r"'mask'|mask is"):
                pipe(X, target=TARGET, **given)
    assert len(driver.graphs) == 2


def test_the_advice_to_give_it_in_the_example_works():
    """`an example with it` above follows the advice."""
    with pytest.raises(PippyError, match=r"give it in the example, too: example_kwargs=\{..., 'mask': ...\}"):
        pipeline(net(object()), nn.MSELoss())(X, target=TARGET, mask=MASK)


@pytest.mark.parametrize(
    "missing", [..., torch.float32, Missing, torch.relu], ids=["ellipsis", "dtype", "class", "function"]
)
def test_other_defaults_that_exist_once(missing):
    """With `...` or a dtype for its default, the Pipe computed as if the mask were given."""
    model = net(missing)
    pipe = pipeline(model)
    torch.testing.assert_close(pipe(X), model(X))
    with pytest.raises(PippyError, match=r"mask|now it is float64") as caught:
        pipe(X, MASK)
    assert "example" in str(caught.value)


class Defaults(TwoLayers):
    """Arguments before and after those with a default of the user's own."""

    width = 4

    def forward(self, x, scale=2.0, mask=Missing, other=Missing(), *, shift=1.0):  # noqa: B008
        x = x.relu() + other
        pipe_split()
        return self.first(x) * scale * mask + shift


def test_an_argument_after_such_a_default():
    class Net(TwoLayers):
        width = 4

        def forward(self, x, mask=Token.MISSING, scale=2.0):
            x = x.relu()
            pipe_split()
            return self.first(x) * (scale if mask is Token.MISSING else 0)

    model = Net()
    torch.testing.assert_close(pipeline(model)(X, scale=3.0), model(X, scale=3.0))


def test_a_default_before_one_that_no_graph_can_have():
    model = Defaults()
    pipe = pipeline(model, example_args=(X,), example_kwargs={"mask": MASK, "other": MASK})
    torch.testing.assert_close(pipe(X, mask=MASK, other=MASK + 1), model(X, mask=MASK, other=MASK + 1))
    pipe = pipeline(model, example_args=(X, MASK, MASK, MASK), example_kwargs={"shift": MASK})
    given = {"mask": MASK, "other": MASK + 1, "shift": MASK + 2}
    torch.testing.assert_close(pipe(X, MASK, **given), model(X, MASK, **given))


# What the loss's target is called: `target`, or with a number where an input of the model has that name.


INPUT, OTHER, MORE, WANTED = torch.randn(4, 6, 4).double()


class NamedModules(nn.Module):
    """Modules by these names: the operation that calls a module has its name."""

    def __init__(self, first, last):
        super().__init__()
        self.names = first, last
        self.add_module(first, nn.Linear(4, 4))
        self.add_module(last, nn.Linear(4, 4))

    def forward(self, x):
        x = self.get_submodule(self.names[0])(x)
        pipe_split()
        return self.get_submodule(self.names[1])(x)


class WithInputs(nn.Module):
    """It has inputs by the names that a target could have."""

    def __init__(self, marked=True):
        super().__init__()
        self.first, self.last, self.marked = nn.Linear(4, 4), nn.Linear(4, 4), marked

    def forward(self, x, target, target_1):
        x = self.first(x) + target
        if self.marked:
            pipe_split()
        return self.last(x) * target_1


@pytest.mark.parametrize(
    "names",
    [("target", "last"), ("first", "target"), ("target", "target_value"), ("_loss", "last"), ("first", "_loss")],
)
def test_a_value_of_a_stage_has_another_name(names, threads):
    model = NamedModules(*names)
    pipe = pipeline(model, nn.MSELoss())
    values = pipe.wiring.values
    assert len(set(values.values())) == len(values)
    expected = nn.functional.mse_loss(model(INPUT), WANTED)
    torch.testing.assert_close(pipe(INPUT, target=WANTED), expected)
    torch.testing.assert_close(PipelineDriver1F1B(pipe, threads).run(2, INPUT, WANTED), expected.detach())


@pytest.mark.parametrize("how", [{}, {"num_stages": 2}], ids=["marked", "balanced"])
@pytest.mark.parametrize(
    "example",
    [
        {"example_args": (INPUT, OTHER, MORE, WANTED)},
        {"example_args": (INPUT, OTHER, MORE), "example_kwargs": {"target_2": WANTED}},
    ],
    ids=["by position", "by name"],
)
def test_an_example_gives_it_by_the_name_that_the_pipe_has(how, example):
    model = WithInputs(marked=not how)
    pipe = pipeline(model, nn.MSELoss(), **how, **example)
    assert pipe.target_name == "target_2"
    torch.testing.assert_close(
        pipe(INPUT, OTHER, MORE, target_2=WANTED), nn.functional.mse_loss(model(INPUT, OTHER, MORE), WANTED)
    )


def test_two_values_of_one_name_are_refused():
    pipe = pipeline(NamedModules("first", "last"), nn.MSELoss())
    pipe.stage(0).graph.find_nodes(op="call_module")[0].name = "target"
    pipe.wiring.values["submod_0"] = "target"
    with pytest.raises(VerificationError, match="two values need two names"):
        verify(pipe)
