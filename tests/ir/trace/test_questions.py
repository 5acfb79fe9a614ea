"""What forward may ask of a traced value: the answer is a tensor's and is checked, or the question is refused with its line."""

import builtins
import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pippy import PipeTracer, SplitPoint, annotate_split_points, is_recomputing, pipe_split, pipeline
from pippy.ir.base.errors import InputError, StageError, TracingError
from tests.ir.linear import OneLinear

asks = isinstance
SENTINEL = object()


class Asks(OneLinear):
    def forward(self, x, flag=True):
        x = self.lin(x)
        pipe_split()
        return self.answer(x, flag)


def asking(answer):
    """A class of models whose second stage ends in ``answer(self, x, flag)``."""
    return type("Asking", (Asks,), {"answer": answer})


class HasAttribute(Asks):
    def answer(self, x, flag):
        return x * 2 if hasattr(x, "mask") or getattr(x, "keys", None) is not None else x * 3


HasShape = asking(lambda self, x, flag: x * 2 if hasattr(x, "shape") and not hasattr(x, "keys") else x * 3)
AliasOfIsinstance = asking(lambda self, x, flag: x * 2 if asks(x, torch.Tensor) else x * 3)
IsinstanceByAttribute = asking(lambda self, x, flag: x * 2 if builtins.isinstance(x, torch.Tensor) else x * 3)


class IsinstanceOfParameter(Asks):
    def answer(self, x, flag):
        return (
            x * 2 if isinstance(self.lin.weight, nn.Parameter) and isinstance(self.lin.weight, torch.Tensor) else x * 3
        )


class MatchesClass(Asks):
    def answer(self, x, flag):
        match x:
            case int():
                return x * 3
            case torch.Tensor():
                return x * 2
        return x


AsksForClass = asking(lambda self, x, flag: x * 2 if issubclass(x.__class__, torch.Tensor) else x * 3)


@functools.singledispatch
def scaled(x):
    return x * 3


@scaled.register
def _(x: torch.Tensor):
    return x * 2


SingleDispatch = asking(lambda self, x, flag: scaled(x))


class GradMode(Asks):
    def answer(self, x, flag):
        with torch.no_grad():
            off = not torch.is_grad_enabled()
        return x * 2 if off else x * 3


ANSWERED = [
    HasAttribute,
    HasShape,
    AliasOfIsinstance,
    IsinstanceByAttribute,
    IsinstanceOfParameter,
    MatchesClass,
    AsksForClass,
    SingleDispatch,
    GradMode,
]


@pytest.mark.parametrize("model", ANSWERED)
def test_questions_that_are_answered_as_for_a_tensor(model):
    model, x = model(), torch.randn(2, 4)
    assert torch.equal(pipeline(model, concrete_args={"flag": True})(x), model(x))


class Sized(OneLinear):
    """What is asked is a number, which has no `mask` either, but that is not known."""

    def forward(self, x):
        pipe_split()
        return self.lin(x) * (2 if hasattr(x.size(0), "numerator") else 3)


def test_an_answer_for_a_tensor_is_checked_when_the_pipe_runs():
    class First(nn.Sequential):
        pass

    with pytest.raises(StageError, match="tracing took for a tensor"):
        pipeline(First(nn.ReLU(), Sized()))(torch.randn(2, 4))


Callable = asking(lambda self, x, flag: x * 2 if callable(x) else x * 3)
LooksUp = asking(lambda self, x, flag: x * {torch.float32: 1.0}.get(x.dtype, 2.0))
RequiresGrad = asking(lambda self, x, flag: x * 2 if x.requires_grad is False else x * 3)
DtypeIs = asking(lambda self, x, flag: x * 2 if x.dtype is torch.float32 else x * 3)


class DtypeIsByName(Asks):
    def answer(self, x, flag):
        dtype = x.dtype
        return x * 2 if torch.float32 is dtype else x * 3


GradIsNone = asking(lambda self, x, flag: x * 2 if x.grad is None else x * 3)


class CatchesLen(Asks):
    def answer(self, x, flag):
        try:
            return x * len(x)
        except Exception:
            return x


class CatchesBool(Asks):
    def answer(self, x, flag):
        try:
            return x if x.sum() > 0 else x + 1
        except Exception:
            return x


class CatchesInt(Asks):
    def answer(self, x, flag):
        try:
            return x * int(x.size(0))
        except Exception:
            return x


class CatchesLoop(Asks):
    def answer(self, x, flag):
        try:
            return sum(row for row in x)
        except Exception:
            return x


FlagIsTrue = asking(lambda self, x, flag: x * 2 if flag is True else x * 3)
FlagIsNotTrue = asking(lambda self, x, flag: x * 2 if True is not flag else x * 3)
FlagIsSentinel = asking(lambda self, x, flag: x * 2 if flag is SENTINEL else x * 3)
TypeIs = asking(lambda self, x, flag: x * 2 if type(x) is torch.Tensor else x * 3)
TypeInAClosure = asking(lambda self, x, flag: (lambda: x * 2 if type(x) is torch.Tensor else x * 3)())


class MatchesSequence(Asks):
    def answer(self, x, flag):
        match flag:
            case [_, _]:
                return x
        return x * 2


class MatchesMapping(Asks):
    def answer(self, x, flag):
        match flag:
            case None:
                return x
            case {"a": _}:
                return x + 1
        return x * 2


class MatchesTrue(Asks):
    def answer(self, x, flag):
        match flag:
            case True:
                return x
        return x * 2


AsksForGradMode = asking(lambda self, x, flag: x * 2 if torch.is_grad_enabled() else x * 3)
AsksWhetherAgain = asking(lambda self, x, flag: x * 2 if is_recomputing() else x * 3)


REFUSED = [
    (Callable, "if callable(x)"),
    (LooksUp, "{torch.float32: 1.0}.get"),
    (RequiresGrad, "x.requires_grad is False"),
    (DtypeIs, "x.dtype is torch.float32"),
    (DtypeIsByName, "torch.float32 is dtype"),
    (GradIsNone, "x.grad is None"),
    (CatchesLen, "return x * len(x)"),
    (CatchesBool, "if x.sum() > 0"),
    (CatchesInt, "int(x.size(0))"),
    (CatchesLoop, "row for row in x"),
    (TypeIs, "type(x) is torch.Tensor"),
    (TypeInAClosure, "type(x) is torch.Tensor"),
    (AsksForGradMode, "if torch.is_grad_enabled()"),
    (AsksWhetherAgain, "if is_recomputing()"),
]


@pytest.mark.parametrize(("model", "line"), REFUSED)
def test_questions_that_are_refused(model, line):
    with pytest.raises(TracingError) as caught:
        pipeline(model())
    assert line in str(caught.value)
    assert "What to do:" in str(caught.value)


class KeepsAsks(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return module_qualified_name == "1" or super().is_leaf_module(m, module_qualified_name)


class Second(nn.Module):
    def __init__(self, asking):
        super().__init__()
        self.add_module("0", nn.Linear(4, 4))
        self.add_module("1", asking)

    def forward(self, x):
        x = self.get_submodule("0")(x)
        pipe_split()
        return self.get_submodule("1")(x, True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asking", [model for model, _ in REFUSED])
def test_the_advice_to_keep_the_module_whole(asking):
    model, x = Second(asking()), torch.randn(2, 4)
    plain = copy.deepcopy(model)
    assert torch.equal(pipeline(model, tracer=KeepsAsks)(x), plain(x))


class ComparesWithNone(Asks):
    def answer(self, x, flag):
        query = key = x
        return x * 2 if x is not None and query is key and None is not query and int is int else x * 3


def test_questions_that_are_none():
    model, x = ComparesWithNone(), torch.randn(2, 4)
    assert torch.equal(pipeline(model)(x), model(x))


class Unpacks(nn.Module):
    def forward(self, x):
        first, second = x.chunk(2, -1)
        return torch.cat([second, first], -1)


@pytest.mark.filterwarnings("ignore:Sequential has no mark")
def test_values_are_unpacked_without_an_example():
    pipe = pipeline(nn.Sequential(*(Unpacks() for _ in range(4))))
    assert torch.equal(pipe(torch.tensor([[1.0, 2.0]])), torch.tensor([[1.0, 2.0]]))


FLAGS = [
    FlagIsTrue,
    FlagIsNotTrue,
    FlagIsSentinel,
    MatchesSequence,
    MatchesMapping,
    MatchesTrue,
]


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.filterwarnings("ignore:.* has no mark that cuts it")
def test_a_flag_is_known_by_its_default_and_another_value_is_refused_or_right(kind):
    """Stand-ins for flags were never True: without a look at the bytecode of forward they took the other branch."""
    model, x = kind(), torch.randn(2, 4)
    pipe = pipeline(model)
    assert torch.equal(pipe(x), model(x)) and torch.equal(pipe(x, True), model(x, True))
    for flag in (False, SENTINEL, [1, 2], {"a": 1}, None):
        try:
            found = pipe(x, flag)
        except InputError:
            continue
        assert torch.equal(found, model(x, flag)), flag
    if kind in (FlagIsTrue, FlagIsNotTrue, MatchesTrue):
        with pytest.raises(InputError, match="went on for True; now it is False"):
            pipe(x, False)
    else:
        assert torch.equal(pipe(x, False), model(x, False))


AsksInTheLibrary = asking(lambda self, x, flag: copy.deepcopy([x])[0] * 2)


def test_what_the_standard_library_asks_for_the_model_is_refused_too():
    with pytest.raises(TracingError, match="asks what a traced value is"):
        pipeline(AsksInTheLibrary())


class Gives(nn.Module):
    """A leaf that gives a pair, with None for its second part if it gives less."""

    def __init__(self, all_of_it):
        super().__init__()
        self.all_of_it = all_of_it

    def forward(self, x):
        return x + 1, x * 2 if self.all_of_it else None


class KeepsGives(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Gives) or super().is_leaf_module(m, module_qualified_name)


class ComparesPart(nn.Module):
    def __init__(self, all_of_it):
        super().__init__()
        self.lin, self.gives, self.decides = nn.Linear(4, 4), Gives(all_of_it), Decides()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x):
        x = self.lin(x)
        pipe_split()
        y, mask = self.gives(x)
        if mask is None:
            return y
        return y * 3


class ComparesCall(ComparesPart):
    def forward(self, x):
        x = self.lin(x)
        pipe_split()
        return x if self.gives(x)[1] is None else x * 3


class HandsOnPart(ComparesPart):
    def forward(self, x):
        given = self.gives(self.lin(x))
        pipe_split()
        return self.decides(given[0], given[1])


class Decides(nn.Module):
    def forward(self, y, mask):
        given = None is not mask
        return y * 3 if given else y


class ComparesWeights(ComparesPart):
    def forward(self, x):
        x = self.lin(x)
        pipe_split()
        y, weights = self.attention(x, x, x, need_weights=self.gives.all_of_it)
        return y if weights is None else y * 3


class ComparesItem(ComparesPart):
    def forward(self, x):
        x = {"x": self.lin(x["x"]), "mask": x["mask"]}
        pipe_split()
        mask = x["mask"]
        return x["x"] * 2 if mask is None else x["x"] * 3


COMPARING = [
    (ComparesPart, "y, mask = self.gives(x)"),
    (ComparesCall, "self.gives(x)[1] is None"),
    (HandsOnPart, "self.decides(given[0], given[1])"),
    (ComparesWeights, "y, weights = self.attention"),
    (ComparesItem, '"mask": x["mask"]'),
]


@pytest.mark.parametrize(("kind", "line"), COMPARING)
def test_what_a_call_gives_is_taken_for_not_none_and_checked(kind, line):
    """It was taken for not None, and nobody checked it: where only the comparison used it, the numbers were wrong."""
    for all_of_it in (True, False):
        model, x = kind(all_of_it), torch.randn(2, 4)
        given = {"x": x, "mask": x if all_of_it else None} if kind is ComparesItem else x
        pipe = pipeline(model, tracer=KeepsGives)
        if all_of_it:
            assert torch.equal(pipe(given), model(given))
            continue
        with pytest.raises(StageError) as caught:
            pipe(given)
        assert "The answer was No when it was traced" in str(caught.value) and line in str(caught.value)


class Differentiates(nn.Module):
    def forward(self, x):
        point, other = x.detach().requires_grad_(), torch.zeros_like(x).requires_grad_()
        energy = point.tanh().square().sum()
        force, nothing = torch.autograd.grad(energy, (point, other), create_graph=True, allow_unused=True)
        return x + force if nothing is None else x + force + nothing


class KeepsDifferentiates(PipeTracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, Differentiates) or super().is_leaf_module(module, name)


@pytest.mark.parametrize("example", [{}, {"example_args": (torch.zeros(2, 4),)}], ids=["without", "with"])
def test_a_gradient_that_there_is_not_is_taken_for_not_none_and_checked(example):
    """The worker added None to a tensor: a TypeError that said nothing of it."""
    model, x = nn.Sequential(nn.Linear(4, 4), Differentiates()), torch.randn(2, 4)
    annotate_split_points(model, {"1": SplitPoint.BEGINNING})
    with pytest.raises(StageError, match="The answer was No when it was traced") as caught:
        pipeline(model, **example)(x)
    assert ("example_args" in str(caught.value)) is not bool(example)
    whole = pipeline(model, tracer=KeepsDifferentiates, **example)
    torch.testing.assert_close(whole(x), model(x))


class GivesAndDecides(Gives):
    def forward(self, x):
        y, mask = super().forward(x)
        return y if mask is None else y * 3


def test_the_advice_to_let_what_gives_the_value_decide():
    model, x = nn.Sequential(nn.Linear(4, 4), GivesAndDecides(False)), torch.randn(2, 4)
    annotate_split_points(model, {"1": SplitPoint.BEGINNING})
    assert torch.equal(pipeline(model, tracer=KeepsGives)(x), model(x))


class ComparesAttribute(ComparesPart):
    """As the items of a batch: what has the attributes is an object of the user's."""

    def forward(self, batch):
        x = self.lin(batch.x)
        pipe_split()
        return x * (2 if batch.mask is None else 3)


def test_an_attribute_of_an_input_is_taken_for_not_none_and_checked():
    model, x = ComparesAttribute(True), torch.randn(2, 4)
    pipe = pipeline(model)
    batch = SimpleNamespace(x=x, mask=x)
    assert torch.equal(pipe(batch), model(batch))
    with pytest.raises(StageError, match="The answer was No when it was traced"):
        pipe(SimpleNamespace(x=x, mask=None))


class Batch(dict):
    """A batch with a method of its own."""

    def mask(self):
        return self.get("mask")


LOOKUPS = {
    "get": lambda batch: batch.get("mask"),
    "get with a default": lambda batch: batch.get("mask", None),
    "getattr": lambda batch: getattr(batch, "get")("mask"),  # noqa: B009
    "a method": lambda batch: batch.mask(),
}


class FindsMask(ComparesPart):
    def __init__(self, look_up):
        super().__init__(True)
        self.look_up = look_up

    def forward(self, batch):
        x = self.lin(batch["x"])
        mask = self.look_up(batch)
        pipe_split()
        return x * 2 if mask is None else x * 3


@pytest.mark.parametrize("look_up", LOOKUPS.values(), ids=LOOKUPS)
def test_what_a_lookup_gives_is_taken_for_not_none_and_checked(look_up):
    model, x = FindsMask(look_up), torch.randn(2, 4)
    pipe = pipeline(model)
    assert torch.equal(pipe(Batch(x=x, mask=x)), model(Batch(x=x, mask=x)))
    for without in (Batch(x=x), Batch(x=x, mask=None)):
        with pytest.raises(StageError, match="The answer was No when it was traced"):
            pipe(without)


def test_with_an_example_without_it_the_answer_is_that_of_the_example():
    model, x = FindsMask(LOOKUPS["get"]), torch.randn(2, 4)
    pipe = pipeline(model, example_args=({"x": x},))
    assert torch.equal(pipe({"x": x}), model({"x": x}))
    with pytest.raises(InputError, match="was not there"):
        pipe({"x": x, "mask": x})
