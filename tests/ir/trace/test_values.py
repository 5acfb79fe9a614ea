"""With example arguments: what Python asks of sizes, dtypes and containers is answered, and checked in each call."""

import copy
import functools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pippy import Pipe, PipeTracer, SplitPoint, annotate_split_points, pipe_split, pipeline
from pippy.ir.base.errors import InputError, MarkError, PippyError, PippyWarning, TracingError
from pippy.ir.pipe import compiled_of
from tests.comparisons import twin
from tests.ir.linear import OneLinear, TwoLinear


class Asking(TwoLinear):
    """Two stages; the tests override `ask`, which the second calls."""

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.ask(self.second(x)).sum()

    def ask(self, x):
        raise NotImplementedError


def asking(ask):
    """A class of models whose second stage ends in ``ask(self, x)``."""
    return type("Asking", (Asking,), {"ask": ask})


If = asking(lambda self, x: x * 2 if x.shape[1] > 3 else x)
IfNot = asking(lambda self, x: x if x.size(0) == 1 else x * 2)
Range = asking(lambda self, x: sum(x[:, i] * i for i in range(x.shape[1])))
Loop = asking(lambda self, x: sum(row * i for i, row in enumerate(x.unbind(1))))


class Unpacked(Asking):
    def ask(self, x):
        rows, columns = x.shape
        first, second = x.split(2, dim=1)
        return first.reshape(rows, -1) - second * columns


Length = asking(lambda self, x: x / math.sqrt(len(x.shape)) + len(x[0]))
ListSlice = asking(lambda self, x: x * [1.0, 2.0, 3.0, 4.0, 5.0][x.size(1)])
Dims = asking(lambda self, x: x * 3 if x.dim() == 2 and x.ndim == 2 else x)


class Dtype(Asking):
    def ask(self, x):
        return x * {torch.float64: 2.0}.get(x.dtype, 3.0) * (2 if x.dtype in (torch.float64, torch.half) else 1)


class Device(Asking):
    def ask(self, x):
        return x + torch.arange(x.shape[1], device=x.device, dtype=x.dtype) if x.device.type == "cpu" else x


class Class(Asking):
    def ask(self, x):
        n = x.shape[0]
        if torch.is_tensor(n) or not (torch.is_tensor(x) and isinstance(n, int) and isinstance(x.shape, tuple)):
            return x
        return (
            x * 2
            if not isinstance(x, (int, list)) and type(x) is torch.Tensor and not callable(x) and type(n) is int
            else x
        )


class Attributes(Asking):
    def ask(self, x):
        return x * 2 if hasattr(x, "T") and not hasattr(x, "mask") and getattr(x, "extra", None) is None else x


Sizes = asking(lambda self, x: x.view(*x.shape[:-1], 2, -1).sum(-1) + torch.full((x.size(0), 2), 1.0, dtype=x.dtype))


class Factories(Asking):
    def ask(self, x):
        n = x.size(1)
        made = torch.arange(n) + torch.tensor([n]) + torch.as_tensor(n) + torch.ones(n) + torch.linspace(0, 1, n)
        return x * made + torch.eye(n).sum() + torch.tril_indices(n, n).sum()


class Numbers(Asking):
    def ask(self, x):
        n = x.size(1)
        return (
            x * float(n) + int(n) + round(n / 3) + math.floor(n / 3) + math.ceil(n / 3) + math.trunc(n / 3) + max(n, 2)
        )


Text = asking(lambda self, x: x * {"4 columns": 2.0}.get(f"{x.shape[1]} columns", 1.0))


class Items(Asking):
    def ask(self, x):
        named = {"a": x, "b": x * 2}
        return sum(value * (2 if name == "b" else 1) for name, value in named.items())


class Asserted(Asking):
    def ask(self, x):
        assert x.shape[1] == 4, f"has {x.shape}"
        if x.dim() != 2:
            raise ValueError(f"has {x.shape}")
        return x


ASKING = [
    If, IfNot, Range, Loop, Unpacked, Length, ListSlice, Dims, Dtype, Device, Class, Attributes, Sizes, Factories, Numbers,
    Text, Items, Asserted,
]  # fmt: skip
X = torch.randn(6, 4, dtype=torch.float64)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def assert_trains_alike(model, *args, **kwargs):
    """A Pipe that was made with these arguments gives what the plain model does, for them and for fewer rows."""
    plain = twin(model)
    pipe = pipeline(model, example_args=args, example_kwargs=kwargs, output_loss_value_spec=True)
    for rows in (6, 5):
        few = [each[:rows] for each in args]
        loss, expected = pipe(*few, **kwargs), plain(*few, **kwargs)
        expected.backward()
        assert torch.equal(loss, expected)
        for mine, other in zip(gradients(model), gradients(plain)):
            torch.testing.assert_close(mine, other, rtol=1e-13, atol=0)
    return pipe


@pytest.mark.parametrize("kind", ASKING, ids=lambda kind: f"line {kind.ask.__code__.co_firstlineno}")
def test_what_is_asked_is_answered_and_the_number_of_rows_stays_free(kind):
    model = kind().double()
    assert_trains_alike(model, X)
    assert model.train(False)(X).isfinite()  # the plain model is as it was


def test_builtins_are_as_they_were():
    pipeline(Class().double(), example_args=(X,))
    assert "type" not in globals() and "callable" not in globals()


class Fixes(TwoLinear):
    """Forward goes on for the sizes of the example."""

    def forward(self, x, scale=1.0):
        if x.shape[0] > 3:
            x = x * 2
        h = self.first(x)
        pipe_split()
        if h.shape[1] > 2 and h.sum(1).shape[0] > 3:
            h = h * scale
        return self.second(h)


def test_a_call_for_which_forward_does_something_else_is_refused_with_the_line():
    pipe = pipeline(Fixes().double(), example_args=(X,))
    assert torch.equal(pipe(X[:4]), twin(pipe)(X[:4]))
    with pytest.raises(InputError, match=r"(?s)went on for True; now it is False.*test_values.py:\d+, in forward"):
        pipe(X[:3])


def test_what_a_stage_computes_is_checked_in_the_stage():
    class OnHidden(Asking):
        def ask(self, x):
            return x * 2 if x.reshape(-1, 8).shape[0] > 2 else x

    pipe = pipeline(OnHidden().double(), example_args=(X,))
    assert compiled_of(pipe).guards.asked.steps == ()
    with pytest.raises(PippyError, match=r"(?s)went on for True; now it is False.*in ask"):
        pipe(X[:4])


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (
            (X[None],),
            {},
            r"x is float64\[1, 6, 4\]; in the example .* a tensor of 2 dimensions.* with this call for its example",
        ),
        ((None,), {}, "'x' is None"),
        (([X],), {}, r"x is list\(float64\[6, 4\]\); in the example .* a tensor"),
        ((X,), {"flag": False}, "'flag' is False, but the model was traced with flag=True"),
        (
            (X,),
            {"batch": {"a": X}},
            r"batch\['b'\] is not there; in the example .* it was a tensor of 1 dimension\.",
        ),
        ((X,), {"other": X}, "'other' is float64.*was traced with other=None"),
        (
            (X[None],),
            {"flag": False, "batch": None},
            r"(?s)'flag' is False.*'batch' is None.*x is float64\[1, 6, 4\]",
        ),
    ],
)
def test_arguments_of_another_kind_than_the_example(args, kwargs, words):
    class Takes(OneLinear):
        def forward(self, x, batch, flag=False, other=None):
            x = self.lin(x) + batch["a"]
            pipe_split()
            x = x * 2 if flag else x
            return x if other is None else x + other

    batch = {"a": X, "b": torch.arange(6)}
    pipe = pipeline(Takes().double(), example_args=(X, batch), example_kwargs={"flag": True})
    given = {"batch": batch, "flag": True, **kwargs}
    with pytest.raises(InputError, match=words):
        pipe(*args, **given)
    assert pipe(X[:2], {"a": X[:2], "b": torch.arange(2)}, flag=True).shape == (2, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "options", "words"),
    [
        ((), {}, {}, "missing a required argument: 'x'"),
        (
            (),
            {"scales": 1.0, "factor": 2},
            {},
            "missing a required argument: 'x'",
        ),
        ((X,), {}, {"concrete_args": {"scales": 1, "scale": X}}, r"(?s)did you mean 'scale'.*'scale'\] is a Tensor"),
        ((X, X, X), {}, {}, r"too many positional arguments; it is called as pipe\(x, scale=1.0\)"),
        ((X,), {"scales": 1.0}, {}, "unexpected keyword argument 'scales'"),
        ((X,), {"scale": 2.0}, {"concrete_args": {"scale": 2.0}}, "given by both concrete_args and example_kwargs"),
        (X, {}, {}, "example_args is a Tensor; give a tuple"),
        ((X,), [X], {}, "example_kwargs is a list"),
    ],
)
def test_examples_that_are_no_arguments_of_the_model(args, kwargs, options, words):
    with pytest.raises(PippyError, match=words):
        pipeline(Fixes().double(), example_args=args, example_kwargs=kwargs, **options)


# Arguments of forward


def decorated(function):
    @functools.wraps(function)
    def forward(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return forward


class Decorated(OneLinear):
    @decorated
    def forward(self, x, mask=None, scale=2.0, twice=False, **extra):
        x = self.lin(x) * scale
        pipe_split()
        return self.rest(x, mask=mask, twice=twice, **extra).sum()

    def rest(self, x, mask, twice, bias=None):
        x = x * 2 if twice else x
        x = x if mask is None else x * mask
        return x if bias is None else x + bias


@pytest.mark.parametrize(
    "kwargs", [{}, {"twice": True}, {"scale": 3}, {"bias": torch.ones(4), "mask": torch.eye(4)[0]}]
)
def test_a_decorated_forward_and_what_it_passes_on(kwargs):
    pipe = assert_trains_alike(Decorated().double(), X, **kwargs)
    with pytest.raises(InputError, match="unexpected keyword argument"):
        pipe(X, **kwargs, other=1)


def test_a_decorated_forward_without_an_example():
    class Plain(Decorated):
        @decorated
        def forward(self, x, scale=2.0, twice=False):
            x = self.lin(x)
            pipe_split()
            return x * (2 if twice else 1) * scale

    model = Plain().double()
    pipe = pipeline(model)
    assert torch.equal(pipe(X), model(X)) and torch.equal(pipe(X, scale=3.0), model(X, 3.0))
    with pytest.raises(PippyError, match="went on for False; now it is True"):
        pipe(X, twice=True)
    assert torch.equal(pipeline(model, concrete_args={"twice": True})(X), model(X, twice=True))


def test_more_positional_arguments():
    class Sums(OneLinear):
        def forward(self, x, *others):
            x = self.lin(x)
            pipe_split()
            return (x + sum(others)).sum()

    assert_trains_alike(Sums().double(), X, X + 1, X * 2)


@dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor | None
    names: tuple[str, ...] = ("a", "b")


def test_containers_are_taken_apart_as_in_plain_python():
    class Takes(OneLinear):
        def forward(self, batch, more):
            x = self.lin(batch.x)
            pipe_split()
            if batch.mask is not None or len(batch.names) != 2 or "x" in more:
                return x * 0
            for name, value in more.items():
                x = x + value if name != "none" else x
            return sum(more[key].sum() for key in more if more[key] is not None) + x.sum() * len(list(more.values()))

    batch, more = Batch(X, None), {"a": X, "none": None, "b": X * 2}
    model = Takes().double()
    plain = twin(model)
    pipe = pipeline(model, example_args=(batch, more), output_loss_value_spec=True)
    loss, expected = pipe(batch, more), plain(batch, more)
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(model.lin.weight.grad, plain.lin.weight.grad)


# Modules that forward makes, and parts that are kept whole


def test_a_loss_that_forward_makes():
    class Makes(Asking):
        def ask(self, x):
            return nn.Sequential(nn.ReLU(), nn.Flatten(0))(x) + nn.MSELoss()(x, torch.zeros_like(x))

    assert_trains_alike(Makes().double(), X)

    class HasParameters(Asking):
        def ask(self, x):
            return self.parts[0](x)

    model = HasParameters()
    model.parts = [nn.Linear(4, 4)]
    with pytest.raises(
        TracingError, match=r"not a part of the model, .* parameters or buffers \(weight, bias\); make it in"
    ):
        pipeline(model.double(), example_args=(X,))


class Picky(nn.Module):
    """It asks for numbers, so it cannot be traced; and it changes a buffer and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        rows = (x.sum(1) != 0).nonzero()
        x = self.lin(x)
        return x * 2 if len(rows) else x


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Picky()) for _ in range(3))

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number < 2:
                pipe_split()
            x = x + x.shape[1]
        return x.sum()


def test_a_part_that_cannot_be_traced_is_kept_whole():
    model = Mixture().double()
    plain = twin(model)
    state = torch.get_rng_state()
    pipe = pipeline(model, example_args=(X,), output_loss_value_spec=True)
    assert torch.equal(torch.get_rng_state(), state) and not any(block[1].calls for block in model.blocks)
    assert list(pipe.kept_whole) == ["blocks.0.1", "blocks.1.1", "blocks.2.1"]
    assert "test_values.py" in pipe.kept_whole["blocks.0.1"]
    loss, expected = pipe(X), plain(X)
    expected.backward()
    assert torch.equal(loss, expected)
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert [block[1].calls.item() for block in model.blocks] == [1, 1, 1]


def test_what_has_a_mark_inside_is_not_kept_whole():
    class Marked(Picky):
        def forward(self, x):
            x = super().forward(x)
            pipe_split()
            return x

    for model in (nn.Sequential(nn.Linear(4, 4), Marked()), nn.Sequential(nn.Linear(4, 4), Picky(), nn.Linear(4, 4))):
        whole = nn.Sequential(model, nn.Linear(4, 4)).double()
        if not isinstance(model[1], Marked):
            model[1].forward = None  # an attribute that no forward reads
            del model[1].forward
            annotate_split_points(whole, {"0.1.lin": SplitPoint.END})
        with pytest.raises((TracingError, MarkError), match=r"(?s)len\(rows\)|split point"):
            pipeline(whole, example_args=(X,))


def test_a_mark_that_a_leaf_would_swallow_is_found():
    def marks():
        pipe_split()

    class Hidden(nn.Module):
        def forward(self, x):
            marks()
            return x

    class Whole(PipeTracer):
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, Hidden) or super().is_leaf_module(m, module_qualified_name)

    with pytest.raises(MarkError, match="inside a Hidden, which is not traced through"):
        pipeline(nn.Sequential(nn.Linear(4, 4), Hidden()).double(), tracer=Whole, example_args=(X,))


def test_a_part_that_has_changed_its_arguments_is_not_kept_whole():
    class Appends(nn.Module):
        def forward(self, x, seen):
            seen.append(x)
            return x * 2 if x.sum() > 0 else x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Appends()

        def forward(self, x):
            seen = []
            return self.part(x, seen) + seen[0]

    with pytest.warns(PippyWarning, match=r"x\.sum"):
        pipe = pipeline(Model(), example_args=(X,))
    assert list(pipe.kept_whole) == [""] and torch.equal(pipe(X), Model()(X))


def test_numbers_of_tensors_are_refused_with_the_line():
    class OnNumbers(Asking):
        def ask(self, x):
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(TracingError, match=r"(?s)in ask.*if x.sum\(\) > 0"):
        pipeline(OnNumbers().double(), example_args=(X,))


# Nothing of the model changes


def test_nothing_changes_while_values_are_computed():
    class Everything(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
            self.spectral = nn.utils.spectral_norm(nn.Linear(4, 4))
            self.seen = []

        def forward(self, x):
            return self.drop(self.spectral(self.norm(x)))

    model = Everything().double()
    hooked = []
    model.norm.register_forward_hook(lambda *_: hooked.append(1))
    state = copy.deepcopy(model.state_dict())
    versions = [each._version for each in (*model.parameters(), *model.buffers())]
    whole = nn.Sequential(model, nn.Linear(4, 4).double())
    random = torch.get_rng_state()
    annotate_split_points(whole, {"1": SplitPoint.BEGINNING})
    pipe = pipeline(whole, example_args=(X,))
    assert hooked == []
    assert [each._version for each in (*model.parameters(), *model.buffers())] == versions
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    pipe(X)
    assert hooked == [1]


def test_a_cache_of_functools_keeps_nothing_of_a_trace():
    @functools.lru_cache
    def recipe(shape):
        return len(shape)

    class Cached(Asking):
        def ask(self, x):
            try:
                return x * recipe(x.shape)
            except TypeError:  # as einops does
                return x * 2

    assert_trains_alike(Cached().double(), X)
    assert recipe.cache_info().currsize == 2  # what the plain model was called with


def test_a_pickled_pipe_keeps_its_guards():
    import pickle

    pipe = pickle.loads(pickle.dumps(pipeline(Fixes().double(), example_args=(X,))))
    assert isinstance(pipe, Pipe)
    with pytest.raises(InputError, match="went on for True; now it is False"):
        pipe(X[:2])


class Meta(type):
    def __new__(cls, name, bases, namespace):
        return type.__new__(cls, name, bases, namespace)

    def __call__(cls, x):
        return type.__call__(cls, x)


class MakesAClass(nn.Module):
    """As an import in forward may do: of `typing.TypedDict`, say."""

    def forward(self, x):
        assert type(x) is torch.Tensor

        class Pair(metaclass=Meta):
            def __init__(self, x):
                self.value = x

        x = Pair(x).value.sin() if isinstance(Pair, type) else x
        pipe_split()
        return x.cos()


def test_a_printed_graph_names_files_without_their_folders():
    pipe = pipeline(If().double(), example_args=(X,))
    text = "".join(str(stage) for _, stage in pipe.stages())
    assert "check_fixed(" in text and "'test_values.py:" in text and "/test_values.py" not in text
    assert any("/test_values.py" in stage.code for _, stage in pipe.stages())


def test_a_metaclass_in_forward():
    x = torch.randn(3)
    assert torch.equal(pipeline(MakesAClass(), example_args=(x,))(x), x.sin().cos())


def test_the_check_of_a_call_changes_no_argument():
    class Pops(OneLinear):
        def forward(self, batch):
            times = batch.pop("times")
            x = self.lin(batch["x"])
            pipe_split()
            return sum(x * number for number in range(times))

    model = Pops().double()
    pipe = pipeline(model, example_args=({"x": X, "times": 3},))
    batch = {"x": X, "times": 3}
    assert torch.equal(pipe(batch), model({"x": X, "times": 3}))
    with pytest.raises(PippyError, match="went on for 3; now it is 2"):
        pipe({"x": X, "times": 2})


@pytest.mark.parametrize("example", [X[:, :3], X.to("meta")], ids=["narrow", "meta"])
def test_an_example_for_which_the_model_fails_is_refused_with_the_line(example):
    for model in (If(), nn.Sequential(nn.Identity(), If())):
        with pytest.raises(InputError, match=r"(?s)with the example arguments.*self\.first\(x\).*What to do: give"):
            pipeline(model.double(), example_args=(example,))


class Takes(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 4)

    def forward(self, x, scale=None):
        x = self.layer(x)
        pipe_split()
        return self.last(x if scale is None else x * scale)


LAYERS = {"linear": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "convolution": nn.Conv1d(4, 4, 1)}
OTHERS = {
    "dtype": (X.float(), "float32, and the model's parameters are float64", "x.to(torch.float64)"),
    "device": (X.to("meta"), "on meta, and the model is on cpu", "x.to('cpu')"),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("other", OTHERS)
def test_an_example_in_another_dtype_or_on_another_device_is_refused_with_its_name(layer, other):
    model = Takes(LAYERS[layer]).double()
    x, why, remedy = OTHERS[other]
    x, right = (each[..., None] if layer == "convolution" else each for each in (x[:, :4], X[:, :4]))
    if layer == "convolution":
        model.last = nn.Identity()
    with pytest.raises(InputError, match="with the example arguments") as caught:
        pipeline(model, example_args=(x,))
    text = str(caught.value)
    assert f"'x' is {why}" in text and f"give {remedy} in the example" in text and "self.layer(x)" in text
    x = x if other == "dtype" else right
    pipe = pipeline(model, example_args=(eval(remedy),))
    assert torch.equal(pipe(right), model(right))


def test_ids_that_are_no_integers_are_named():
    with pytest.raises(InputError, match=r"this operation takes x=float32\[2, 4\]"):
        pipeline(Takes(nn.Embedding(4, 4)), example_args=(torch.ones(2, 4),))


def test_an_example_in_a_dtype_that_the_model_or_autocast_converts():
    class Converts(Takes):
        def forward(self, x):
            return super().forward(x.double(), x)

    model, x = Converts(nn.Linear(4, 4)).double(), torch.randn(2, 4)
    assert torch.equal(pipeline(model, example_args=(x,))(x), model(x))
    model = Takes(nn.Linear(4, 4)).bfloat16()
    with pytest.raises(InputError, match=r"call pipeline\(\) under it, too"):
        pipeline(model, example_args=(x,))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pipeline(model, example_args=(x,))(x), model(x))


class Grouped(nn.Module):
    """Matrices for groups of rows: torch multiplies them in float32, and its rules for fake tensors know bfloat16 only."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(2, 4, 8))

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        ends = torch.zeros(2, dtype=int) + x.shape[0] * torch.tensor([0, 1])
        y = nn.functional.grouped_mm(x, self.weight, offs=ends.to(torch.int32))
        return y * y.shape[1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_operation_that_torch_refuses_for_fake_tensors_only(device, caplog):
    model, x = Grouped(), torch.randn(6, 4)
    plain = twin(model)
    pipe = Pipe.from_tracing(model.to(device), example_args=(x[:2].to(device),))
    assert pipe.num_stages == 2 and not caplog.records
    if device == "cpu":
        torch.testing.assert_close(pipe(x), plain(x))
    with pytest.raises(InputError, match="this operation fails"):
        Pipe.from_tracing(model, example_args=(x[:2].to(device)[:, None],))


class Checked(TwoLinear):
    """`torch._check` of what the numbers say, as transformers compares the tokens of images with their features."""

    def forward(self, x):
        torch._check_tensor_all_with(ValueError, x > 0, lambda: "not all are positive")
        x = self.first(x)
        pipe_split()
        torch._check(x[x > 9].numel() == 0, lambda: "some are large")
        return self.second(x)


def test_a_check_of_torch_of_what_is_not_known_is_made_when_the_graph_runs():
    model = Checked()
    pipe, x = pipeline(model, example_args=(torch.rand(2, 4),)), torch.rand(3, 4)
    assert not pipe.kept_whole
    torch.testing.assert_close(pipe(x), model(x))
    with pytest.raises(PippyError, match="not all are positive"):
        pipe(-x)
    with pytest.raises(PippyError, match="some are large"):
        pipe(1000 * x)


class Angles(nn.Module):
    """A table of angles in a buffer that is made again when longer rows come, as models of Hugging Face had it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0).cos(), persistent=False)

    def forward(self, x):
        if x.shape[1] > len(self.table):
            self.register_buffer("table", torch.arange(x.shape[1], dtype=self.table.dtype).cos(), persistent=False)
        return self.table[: x.shape[1], None]


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.angles = nn.Linear(4, 4), nn.Linear(4, 4), Angles()

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.second(x * self.angles(x))


def test_a_buffer_that_grows_is_in_a_part_that_is_kept_whole():
    """With an example of short rows a call with longer ones is refused, and an example of these is right for all."""
    model, short, long = Turning(), torch.randn(2, 3, 4), torch.randn(2, 6, 4)
    with pytest.raises(PippyError, match="and went on for False; now it is True"):
        pipeline(model, example_args=(short,))(long)
    pipe = pipeline(model, example_args=(long,))
    assert list(pipe.kept_whole) == ["angles"] and model.angles.table.shape == (4,)
    for x in (short, long, short):
        torch.testing.assert_close(pipe(x), copy.deepcopy(model)(x))
