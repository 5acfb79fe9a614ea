"""What `is`, `type`, `match` and `assert` ask of values that are known is answered as in plain Python; alike on each Python."""

import cProfile
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pippy import PipeTracer, pipe_split, pipeline
from pippy.ir.base.errors import InputError, PippyError, TracingError
from pippy.ir.trace.tracing_thread import CallWatch
from tests.comparisons import twin
from tests.ir.linear import TwoLinear

X = torch.randn(6, 4, dtype=torch.float64)


class Asks(nn.Module):
    """It has two stages, and asks `is_asked` of what it is to say about a value."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.same, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity(), nn.Dropout(0.5)

    def forward(self, x):
        h = self.first(x)
        pipe_split()
        h = self.second(h)
        return h * 2 if self.asks(h) else h * 3


def asking(question):
    def make():
        model = Asks().double().eval()
        model.__class__ = type(question.__name__, (Asks,), {"asks": lambda self, h: question(self, h)})
        return model

    return make


def matches(value):
    match value:
        case [_, 4]:
            return "pair"
        case {"a": held, **rest}:
            return held, list(rest)
        case torch.float64:
            return "double"
    return None


def in_place(self, h):
    before = h
    h += 1
    return h is before


QUESTIONS = {
    "contiguous": lambda self, h: h.contiguous() is h,
    "transposed": lambda self, h: h.t().contiguous() is h,
    "not contiguous": lambda self, h: (t := h.t()) is t.contiguous(),
    "to": lambda self, h: h.to(torch.float64) is h and h.double() is h and h.cpu() is h,
    "to another": lambda self, h: h.to(torch.float32) is not h and h.float() is not h,
    "dropout": lambda self, h: F.dropout(h, 0.5, self.training) is h,
    "modules": lambda self, h: self.same(h) is h and self.drop(h) is h,
    "views": lambda self, h: h.view(-1, 4) is not h and h[:] is not h and h.expand(-1, 4) is not h,
    "itself": lambda self, h: h is h and (h is not None) and None is not h,
    "in place": in_place,
    "parameters": lambda self, h: self.first.weight is self.first.weight and self.first.weight is not self.second.weight,
    "dtype": lambda self, h: h.dtype is torch.float64 and torch.float32 is not h.dtype,
    "dtype of another": lambda self, h: h.dtype is self.first.weight.dtype,
    "layout": lambda self, h: h.layout is torch.strided,
    "requires_grad": lambda self, h: h.is_cuda is False and h.is_sparse is not True,
    "type": lambda self, h: type(h) is torch.Tensor and type(h.shape) is torch.Size and type(h.dtype) is torch.dtype,
    "getattr": lambda self, h: getattr(h, "none", None) is None and getattr(h, "T", None) is not None,
    "callable": lambda self, h: not callable(h) and callable(h.sum),
    "match": lambda self, h: matches(h.shape) == "pair" and matches(h) is None and matches(h.dtype) == "double",
    "match a dict": lambda self, h: matches({"a": h, "b": 1})[1] == ["b"],
    "membership": lambda self, h: h.dtype in {torch.float64} and h.dtype in (torch.half, torch.float64),
    "sizes as keys": lambda self, h: {4: True}.get(h.shape[1], False) and h.shape[1] in {4, 5},
    "tensors as keys": lambda self, h: {h: 1}.get(h) == 1 and h.relu() not in {h},
    "subclass": lambda self, h: isinstance(h, (int, torch.Tensor)) and not isinstance(h, nn.Parameter),
    "mapped": lambda self, h: list(map(type, [h, h.shape])) == [torch.Tensor, torch.Size],
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_is_known_is_answered_as_in_plain_python(name):
    model = asking(QUESTIONS[name])()
    plain = twin(model)
    pipe = pipeline(model, example_args=(X,))
    for x in (X, X[:3]):
        assert torch.equal(pipe(x), plain(x))


def test_the_answer_is_checked_where_it_can_change():
    """In training the dropout does not return what it is given."""
    model = asking(QUESTIONS["modules"])()
    pipe = pipeline(model, example_args=(X,))
    with pytest.raises(PippyError):
        pipe.train()(X)
    model = asking(QUESTIONS["dtype"])()
    pipe = pipeline(model, example_args=(X,)).float()
    with pytest.raises(PippyError, match=r"went on for torch\.float64; now it is torch\.float32"):
        pipe(X.float())


def test_nothing_is_fixed_that_is_not_asked():
    """Traced again, h.dtype is float64 itself, and no number of the graph may depend on it."""

    class Casts(Asks):
        def asks(self, h):
            self.drop(h).contiguous().to(h.dtype) + torch.finfo(h.dtype).min
            return True

    model = Casts().double()
    pipe = pipeline(model, example_args=(X,)).float()
    assert pipe.eval()(X.float()).dtype is torch.float32
    assert "check_" not in "".join(str(stage) for _, stage in pipe.stages())


@pytest.mark.parametrize(
    "name", ["contiguous", "to", "dropout", "modules", "dtype", "layout", "type", "match", "tensors as keys"]
)
def test_without_an_example_it_is_refused_with_the_line_and_what_to_do(name):
    with pytest.raises(TracingError, match="What to do") as caught:
        pipeline(asking(QUESTIONS[name])())
    assert "test_identities.py" in str(caught.value)
    pipeline(asking(QUESTIONS[name])(), example_args=(X,))  # the advice


class Attends(TwoLinear):
    def forward(self, query, key):
        h = self.first(query)
        pipe_split()
        return self.second(h) * (2 if query is key else 3) + key


@pytest.mark.parametrize("with_example", [False, True])
def test_inputs_that_are_one_object(with_example):
    """`query is key` was answered as for two objects, also in a call with one."""
    model, other = Attends().double(), X + 1
    pipe = pipeline(model, **({"example_args": (X, other)} if with_example else {}))
    assert torch.equal(pipe(X, other), model(X, other))
    with pytest.raises(InputError, match="query and key are one object, and forward asks"):
        pipe(X, X)
    pipe = pipeline(model, example_args=(X, X))
    assert torch.equal(pipe(X, X), model(X, X))
    with pytest.raises(InputError, match="query and key are two objects"):
        pipe(X, other)


class Asserts(TwoLinear):
    def forward(self, x):
        assert (x < 100).all(), f"{x.shape} has more, the sum is {x.sum()}"
        assert not x.isnan().any() and (x > -100).all()
        for each in (x, x + 1):
            assert each.isfinite().all()
        h = self.first(x)
        pipe_split()
        if not h.isfinite().all():
            raise AssertionError("not finite")
        return self.second(h)


@pytest.mark.parametrize("kind", [{}, {"example_args": (X,)}], ids=["without", "example"])
def test_assertions_are_recorded(kind):
    """`assert` was known by its bytecode, which is another one on Python 3.13: a legal one was refused."""
    model = Asserts().double()
    pipe = pipeline(model, **kind)
    assert torch.equal(pipe(X), model(X))
    for wrong in (X + 1000, X - 1000, X * torch.nan):
        with pytest.raises(PippyError, match="an assertion in forward failed"):
            pipe(wrong)


class Branches(Asserts):
    def forward(self, x):
        h = self.first(x)
        pipe_split()
        try:
            if h.sum() > 0:
                h = self.second(h)
        except AssertionError:
            h = h * 2
        while not h.sum() > 1:
            h = h + 1
        return h


@pytest.mark.parametrize("kind", [{}, {"example_args": (X,)}], ids=["without", "example"])
def test_branches_are_refused_with_the_line_as_ever(kind):
    with pytest.raises(TracingError, match=r"(?s)control flow.*if h.sum\(\) > 0"):
        pipeline(Branches().double(), **kind)


def test_only_what_forward_calls_is_watched(monkeypatch):
    """torch.fx calls a thousand times more before it runs forward."""
    told, tell = set(), CallWatch._on_event

    def noted(watch, frame, event, function):
        told.add(frame.f_code.co_name)
        return tell(watch, frame, event, function)

    monkeypatch.setattr(CallWatch, "_on_event", noted)
    pipeline(asking(QUESTIONS["dtype"])(), example_args=(X,))
    assert "forward" in told and not {"collect_tensor_attrs", "create_args_for_root", "revert"} & told


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile does not use sys.setprofile there")
def test_a_profiler_is_paused_and_goes_on():
    model = asking(QUESTIONS["subclass"])()
    with cProfile.Profile() as profile:
        with pytest.warns(UserWarning, match="it is paused"):
            pipe = pipeline(model, example_args=(X,))
        sorted([3, 2, 1])
    assert torch.equal(pipe(X), model(X))
    assert any("sorted" in str(entry.code) for entry in profile.getstats())


def test_a_debugger_or_a_coverage_tool_changes_nothing():
    """Under one the bytecode was not watched, and the questions were answered as for the stand-in."""
    seen = []
    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: seen.append(event))
    try:
        pipe = pipeline(asking(QUESTIONS["dtype"])(), example_args=(X,))
        with pytest.raises(TracingError):
            pipeline(asking(QUESTIONS["type"])())
    finally:
        sys.settrace(before)
    assert seen and pipe(X).shape == X.shape


class Keeps(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Second) or super().is_leaf_module(m, module_qualified_name)


class Second(nn.Module):
    def forward(self, x, y):
        return y


def test_a_leaf_that_returns_one_of_its_arguments():
    class Model(Asks):
        def __init__(self):
            super().__init__()
            self.gives = Second()

        def asks(self, h):
            other = h + 1
            return self.gives(h, other) is other and self.gives(other, h) is h

    model = Model().double()
    assert torch.equal(pipeline(model, tracer=Keeps, example_args=(X,))(X), model(X))


class HasDefault(nn.Module):
    """It takes an input that has a default, and asks whether it is that."""

    def __init__(self, asks):
        super().__init__()
        self.first, self.second, self.asks = nn.Linear(4, 4), nn.Linear(4, 4), asks

    @classmethod
    def of(cls, default, asks):
        def forward(self, x, by=default, other=2.0, dims=(0, -1)):
            h = self.first(x)
            pipe_split()
            h = self.second(h).sum(dims[1], keepdim=True)
            return h if self.asks and by is default else h * by + other

        made = type("WithDefault", (cls,), {"forward": forward})
        return made(asks).double()


@pytest.mark.parametrize("default", [0, 1.5, (), [], {}, (1, 2)], ids=repr)
def test_a_default_that_forward_asks_for_is_given_or_left_out_in_an_example(default):
    model, by = HasDefault.of(default, asks=True), torch.full((6, 1), 3.0, dtype=torch.float64)
    pipe = pipeline(model)
    assert torch.equal(pipe(X, by), model(X, by))
    with pytest.raises(InputError, match=r"by is its default, .*Make another Pipe with this call for its example"):
        pipe(X)
    assert torch.equal(pipeline(model, example_args=(X,))(X), model(X))  # the advice


@pytest.mark.parametrize("default", [2, 1.5], ids=repr)
def test_a_default_that_forward_computes_with_is_as_any_other_value(default):
    model = HasDefault.of(default, asks=False)
    assert torch.equal(pipeline(model)(X), model(X))
