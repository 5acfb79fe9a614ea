"""What a message of the compiler says to do works when it is done: the Pipe gives the plain model's numbers.

Each row has words of a message, what gets the message, and what the message says to do. Messages whose advice other tests try
are not here.
"""

# mypy: disable-error-code="arg-type, dict-item"

import copy
import functools
import random

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from pippy import (
    LossWrapper,
    MultiUseParameterConfig,
    Pipe,
    PipeSplitWrapper,
    PipeTracer,
    PippyError,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    pipe_split,
    pipeline,
)
from pippy.errors import StageError
from tests.comparisons import assert_same, assert_same_gradients, assert_same_state

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
TRANSMIT, REPLICATE = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE
TRANSMIT_A = {"a.weight": TRANSMIT}
X = torch.randn(3, 4, dtype=torch.float64)
mse = F.mse_loss


class Base(nn.Module):
    """Two layers, a buffer and a block that may be kept whole."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.ones(4))


def net(forward, **parts):
    """A model with this forward."""
    made = type("Net", (Base,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def two(self, x):
    x = self.a(x)
    pipe_split()
    return self.b(x)


def same(model, *inputs, loss=mse, prepare=lambda model: model, **options):
    """Train a Pipe of ``model`` beside a copy, both prepared."""
    plain = prepare(copy.deepcopy(model))
    prepare(model)
    pipe = pipeline(model, loss, **options)
    for _ in range(2):
        expected = plain(*inputs)
        target = () if loss is None else (torch.ones_like(expected),)
        expected = expected if loss is None else loss(expected, *target)
        if loss is not None:
            expected.backward()
        assert_same(pipe(*inputs, *target), expected.detach(), "result")
        assert_same_state(pipe, plain)
    if loss is not None:
        assert_same_gradients(pipe, plain)


class Block(nn.Module):
    """A layer that is kept whole by `Keeps`."""

    def __init__(self, function, held=None):
        super().__init__()
        self.function, self.held = function, held

    def forward(self, *args):
        return self.function(*args) if self.held is None else self.function(self.held, *args)


class Keeps(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Block) or super().is_leaf_module(m, module_qualified_name)


def with_block(function):
    """A model whose second stage has ``function`` in a block."""

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(self.block(x))

    return net(forward, block=Block(function))


def in_second(function):
    """A model whose second stage has ``function`` in its own forward."""

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(function(self, x))

    return net(forward)


def with_numbers(function):
    model = in_second(function)
    model.register_buffer("numbers", torch.tensor([1 + 2j, 3 + 4j, 0j, 1j]))
    return model


# Values that cannot be known


def doubled_if_positive(x):
    return x * 2 if x.sum() > 0 else x


torch.fx.wrap("doubled_if_positive_by_name")


def doubled_if_positive_by_name(x):
    return x * 2 if x.sum() > 0 else x


def sets_attribute(self, x):
    self.last = x.sum()
    return x * 2


def counts_in_a_buffer(self, x):
    self.count.add_(x.detach().mean(0))
    return x * self.count.clone()


def changes_real_part(self, x):
    c = torch.tensor([1 + 2j, 3 + 4j, 0j, 1j])
    c.real.add_(1)
    return x * c.abs()


def makes_it_with_changed_numbers(self, x):
    return x * torch.tensor([2 + 2j, 4 + 4j, 1 + 0j, 1 + 1j]).abs()


def changes_real_part_of_a_buffer(self, x):
    self.numbers.real.add_(1)
    return x * self.numbers.abs()


def sets_data(self, x):
    self.count.data = self.count + 1
    return x * self.count.clone()


def copies_into_it(self, x):
    with torch.no_grad():
        self.count.copy_(self.count + 1)
    return x * self.count.clone()


def makes_parameter(self, x):
    return x * nn.Parameter(self.count * 2)


def keeps_it_plain(self, x):
    return x * (self.count * 2)


def rebinds(self, x):
    self.count = (self.count + 1).half()
    return x * self.count


def adds_to_it(self, x):
    self.count += 1
    return x * self.count.clone()


def stops_gradients(self, x):
    y = x * 2
    y.requires_grad = False
    return y


def detaches(self, x):
    return (x * 2).detach() + x


TRACING = [
    ("control flow", lambda: in_second(lambda _, x: doubled_if_positive(x)), lambda: with_block(doubled_if_positive)),
    (
        "torch.fx.wrap",
        lambda: in_second(lambda _, x: doubled_if_positive(x)),
        lambda: in_second(lambda _, x: doubled_if_positive_by_name(x)),
    ),
    ("a view of another dtype", lambda: in_second(changes_real_part), lambda: in_second(makes_it_with_changed_numbers)),
    (
        "a view of another dtype",
        lambda: in_second(changes_real_part),
        lambda: with_numbers(changes_real_part_of_a_buffer),
    ),
    (".copy_()", lambda: in_second(sets_data), lambda: in_second(copies_into_it)),
    ("as a plain value", lambda: in_second(makes_parameter), lambda: in_second(keeps_it_plain)),
    ("use .detach()", lambda: in_second(stops_gradients), lambda: in_second(detaches)),
]


@pytest.mark.parametrize(("words", "fails", "advised"), TRACING)
def test_what_forward_may_do_instead(words, fails, advised):
    with pytest.raises(PippyError) as caught:
        pipeline(fails())
    assert words in str(caught.value)
    same(advised(), X, tracer=Keeps)


@pytest.mark.parametrize("advised", [adds_to_it, counts_in_a_buffer])
def test_a_buffer_is_changed_in_place_where_what_forward_assigns_does_not_fit(advised):
    with pytest.raises(PippyError, match=r"self.count.copy_\(...\), .add_\(...\) or \+="):
        pipeline(in_second(rebinds), example_args=(X,))
    same(in_second(advised), X, tracer=Keeps)


def draws_in_python(self, x):
    return x * 2 if random.random() < 0.5 else x


def draws_with_torch(self, x):
    return torch.where(torch.rand(()) < 0.5, x * 2, x)


def test_random_numbers():
    with pytest.raises(PippyError) as caught:
        pipeline(in_second(draws_in_python))
    assert "(torch.rand(()) < p and torch.where)" in str(caught.value)
    model = in_second(draws_with_torch)
    plain, pipe, found = copy.deepcopy(model), pipeline(model), set()
    for seed in range(8):
        torch.manual_seed(seed)
        expected = plain(X)
        torch.manual_seed(seed)
        assert_same(pipe(X), expected, "output")
        found.add(float(expected.detach().sum()))
    assert len(found) == 2


def test_an_attribute_that_forward_sets():
    with pytest.warns(match="keep it in a buffer that is changed in place"):
        pipeline(in_second(sets_attribute))
    same(in_second(counts_in_a_buffer), X)


# What is given


def hooked():
    model = net(two)
    model.register_forward_hook(lambda module, args, output: output * 2)
    return model


class Inside(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def inside_of_a_module():
    model = Inside(hooked())
    plain = copy.deepcopy(model)
    assert_same(pipeline(model)(X), plain(X), "output")


class OfItsOwn(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


def marked(model, spec):
    annotate_split_points(model, spec)
    return model


class Unfinished(LossWrapper):
    pass


class Weighted(LossWrapper):
    def forward(self, x, target, weight):
        return self.loss_fn(self.module(x), target) * weight


class LossAndOutput(LossWrapper):
    def forward(self, x, target):
        output = self.module(x)
        return self.loss_fn(output, target), output


def test_a_model_with_its_loss():
    with pytest.raises(NotImplementedError, match="TrivialLossWrapper"):
        Unfinished(nn.Linear(4, 4), mse)(X, X)
    model = net(two)
    plain = copy.deepcopy(model)
    with pytest.raises(PippyError, match=r"pipeline\(wrapper\)"):
        pipeline(model, TrivialLossWrapper(model, mse))
    with pytest.raises(PippyError, match="LossWrapper whose forward takes it as an input"):
        pipeline(model, lambda output, target, weight: None)
    assert_same(pipeline(TrivialLossWrapper(model, mse))(X, X), mse(plain(X), X), "loss")
    assert_same(pipeline(Weighted(model, mse))(X, X, 3.0), 3 * mse(plain(X), X), "loss")
    assert_same(
        pipeline(model, functools.partial(mse, reduction="sum"))(X, X), mse(plain(X), X, reduction="sum"), "loss"
    )


def two_outputs(self, x):
    x = two(self, x)
    return mse(x, X), x


GIVEN = [
    ("give an instance of it: pipeline(Base(...))", lambda: pipeline(Base), lambda: same(net(two), X)),
    ("put the function in a module's forward", lambda: pipeline(two), lambda: same(net(two), X)),
    ("the model that it was made from", lambda: pipeline(pipeline(net(two))), lambda: same(net(two), X)),
    ("put the model inside a module that calls it", lambda: pipeline(hooked()), inside_of_a_module),
    (
        "call pipeline(model)",
        lambda: Pipe.from_sequential(OfItsOwn(nn.Linear(4, 4), nn.ReLU())),
        lambda: same(marked(OfItsOwn(nn.Linear(4, 4), nn.ReLU()), {"1": SplitPoint.BEGINNING}), X),
    ),
    ("call pipeline(model) for any module", lambda: Pipe.from_sequential(net(two)), lambda: same(net(two), X)),
    (
        "a torch.fx.Tracer, or a class of one",
        lambda: pipeline(net(two), tracer=dict),
        lambda: same(net(two), X, tracer=Keeps),
    ),
    (
        "give SplitPoint.BEGINNING or SplitPoint.END",
        lambda: annotate_split_points(nn.Sequential(nn.Linear(4, 4)), {"0": "end"}),
        lambda: same(marked(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"0": SplitPoint.END}), X),
    ),
    (
        "give SplitPoint.BEGINNING or SplitPoint.END",
        lambda: PipeSplitWrapper(nn.ReLU(), "beginning"),
        lambda: same(nn.Sequential(nn.Linear(4, 4), PipeSplitWrapper(nn.ReLU(), SplitPoint.BEGINNING)), X),
    ),
    (
        "give a dict: {'layer.3': SplitPoint.END}",
        lambda: annotate_split_points(nn.Sequential(nn.Linear(4, 4)), "0"),
        lambda: same(marked(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"0": SplitPoint.END}), X),
    ),
    (
        "pass a tracer whose is_leaf_module says False for it",
        lambda: pipeline(
            marked(with_block_around(nn.Linear(4, 4)), {"block.held": SplitPoint.BEGINNING}), tracer=Keeps
        ),
        lambda: same(marked(with_block_around(nn.Linear(4, 4)), {"block.held": SplitPoint.BEGINNING}), X),
    ),
    (
        "give an instance of it: MSELoss()",
        lambda: pipeline(net(two), nn.MSELoss),
        lambda: same(net(two), X, loss=nn.MSELoss()),
    ),
    ("a module or a function of (output, target)", lambda: pipeline(net(two), 3), lambda: same(net(two), X)),
    (
        "give one of them",
        lambda: pipeline(net(two_outputs), mse, output_loss_value_spec=(True, False)),
        lambda: pipeline(net(two_outputs), output_loss_value_spec=(True, False))(X),
    ),
    (
        "say with output_loss_value_spec which of it is the loss, for example (True, False)",
        lambda: pipeline(LossAndOutput(net(two), mse)),
        lambda: pipeline(LossAndOutput(net(two), mse), output_loss_value_spec=(True, False))(X, X),
    ),
    (
        "reduce it, with .mean() or .sum()",
        lambda: pipeline(net(two), lambda output, target: output - target)(X, X),
        lambda: same(net(two), X, loss=lambda output, target: (output - target).mean()),
    ),
    (
        "give a dict from names of forward's arguments to values",
        lambda: pipeline(net(two), concrete_args=3),
        lambda: same(net(scaled), X, concrete_args={"scale": 3}),
    ),
]


def with_block_around(layer):
    def forward(self, x):
        return self.block(self.a(x))

    return net(forward, block=Block(lambda held, x: held(x) * 2, layer))


def scaled(self, x, scale=3):
    return two(self, x) * (2 if scale > 2 else 1)


@pytest.mark.parametrize(("words", "fails", "advised"), GIVEN)
def test_what_to_give_instead(words, fails, advised):
    with pytest.raises(PippyError) as caught:
        fails()
    assert words in str(caught.value)
    advised()


# Stages that share


def tied(self, x):
    x = self.a(x)
    pipe_split()
    return self.b(x) @ self.a.weight


class Scales(nn.Module):
    def __init__(self, scale):
        super().__init__()
        if isinstance(scale, nn.Parameter):
            self.scale = scale
        else:
            self.register_buffer("scale", scale)

    def forward(self, x):
        return x * self.scale


def scales_twice(scale):
    def forward(self, x):
        return self.block(two(self, self.block(x)))

    return net(forward, block=Block(lambda held, x: held(x), Scales(scale)))


def norm_twice(self, x):
    x = self.norm(self.a(x))
    pipe_split()
    return self.b(self.norm(x))


def norm_twice_in_one(self, x):
    x = self.a(x)
    pipe_split()
    return self.b(self.norm(self.norm(x)))


def norm_of_its_own(self, x):
    x = self.norm(self.a(x))
    pipe_split()
    return self.b(self.other(x))


def norms():
    return {"norm": nn.BatchNorm1d(4), "other": nn.BatchNorm1d(4)}


def counts_late(self, x):
    x = self.a(x) * self.count
    pipe_split()
    self.count += 1
    return self.b(x) * self.count.clone()


def counts_first(self, x):
    x = self.a(x)
    self.count += 1
    x = x * self.count.clone()
    pipe_split()
    return self.b(x) * self.count.clone()


def counts_in_one(self, x):
    x = self.a(x)
    pipe_split()
    x = x * self.count.clone()
    self.count += 1
    return self.b(x) * self.count.clone()


def changes_skip(self, x):
    x = skip = self.a(x) * 1
    pipe_split()
    x += 1
    pipe_split()
    return self.b(x) + skip


def makes_new_skip(self, x):
    x = skip = self.a(x) * 1
    pipe_split()
    x = x + 1
    pipe_split()
    return self.b(x) + skip


def moves_split(self, x):
    x = skip = self.a(x) * 1
    x += 1
    pipe_split()
    return self.b(x) + skip


def marked_first(self, x):
    pipe_split()
    return two(self, x)


def keeps_weight_in_leaf(model):
    model.block = Block(lambda held, x: held(x), model.a)
    return model


def uses_in_leaf(self, x):
    x = self.a(x)
    pipe_split()
    return self.b(self.block(x))


SHARED = [
    (
        "say REPLICATE, or trace through that module",
        lambda: pipeline(keeps_weight_in_leaf(net(uses_in_leaf)), multi_use_param_spec=TRANSMIT_A, tracer=Keeps),
        lambda: same(keeps_weight_in_leaf(net(uses_in_leaf)), X, multi_use_param_spec=REPLICATE, tracer=Keeps),
    ),
    (
        "Register it as an nn.Parameter of the model",
        lambda: pipeline(scales_twice(torch.ones(4, requires_grad=True)), tracer=Keeps),
        lambda: same(scales_twice(nn.Parameter(torch.ones(4))), X, tracer=Keeps),
    ),
    (
        "Move the split so that one stage makes every call",
        lambda: pipeline(net(norm_twice, **norms())),
        lambda: same(net(norm_twice_in_one, **norms()), X),
    ),
    (
        "give each call a module of its own",
        lambda: pipeline(net(norm_twice, **norms())),
        lambda: same(net(norm_of_its_own, **norms()), X),
    ),
    ("use it only at and after the stage that", lambda: pipeline(net(counts_late)), lambda: same(net(counts_first), X)),
    ("so that one stage holds every use", lambda: pipeline(net(counts_late)), lambda: same(net(counts_in_one), X)),
    ("(x = x + y, inplace=False)", lambda: pipeline(net(changes_skip)), lambda: same(net(makes_new_skip), X)),
    ("or move the split", lambda: pipeline(net(changes_skip)), lambda: same(net(moves_split), X)),
    ("take this mark away", lambda: pipeline(net(marked_first)), lambda: same(net(two), X)),
    (
        "give MultiUseParameterConfig.TRANSMIT or .REPLICATE",
        lambda: pipeline(net(tied), multi_use_param_spec="transmit"),
        lambda: same(net(tied_by_name), X, multi_use_param_spec={"a.weight": TRANSMIT}),
    ),
]


def tied_by_name(self, x):
    x = F.linear(x, self.a.weight)
    pipe_split()
    return F.linear(self.b(x), self.a.weight)


@pytest.mark.parametrize(("words", "fails", "advised"), SHARED)
def test_what_stages_may_share(words, fails, advised):
    with pytest.raises(PippyError) as caught:
        fails()
    assert words in str(caught.value)
    advised()


# Calls of a Pipe


def test_a_parameter_that_is_replaced():
    model = net(tied_by_name)
    pipe, other = pipeline(model), {"a.weight": torch.ones(4, 4)}
    with pytest.raises(PippyError, match=r"change the tensor in place, under torch.no_grad\(\), or call pipeline"):
        functional_call(pipe, other, (X,))
    with torch.no_grad():
        pipe.get_parameter("a.weight").copy_(other["a.weight"])
    assert_same(pipe(X), model(X), "output")
    model.a.weight = nn.Parameter(2 * other["a.weight"])
    assert_same(pipeline(model)(X), model(X), "output")


def test_a_loss_of_frozen_parameters():
    model = net(two).requires_grad_(False)
    pipe = pipeline(model, mse)
    with pytest.raises(StageError, match=r"Run the Pipe under torch.no_grad\(\) to compute it alone"):
        pipe(X, X)
    with torch.no_grad():
        assert_same(pipe(X, X), mse(model(X), X), "loss")


def test_an_input_that_is_none():
    def forward(self, x, mask=None):
        x = two(self, x)
        return x if mask is None else x * mask

    pipe = pipeline(net(forward))
    with pytest.raises(PippyError) as caught:
        pipe(X)
    assert "pipeline(model, ..., concrete_args={'mask': None})" in str(caught.value)
    same(net(forward), X, concrete_args={"mask": None})


def test_a_constant_that_was_traced():
    pipe = pipeline(net(scaled), concrete_args={"scale": 3})
    with pytest.raises(PippyError, match="trace it again to run it with another value"):
        pipe(X, 1)
    same(net(scaled), X, 1, concrete_args={"scale": 1})


def test_a_state_dict_that_would_be_assigned():
    model = net(two)
    pipe, state = pipeline(model), {name: value + 1 for name, value in model.state_dict().items()}
    with pytest.raises(PippyError, match="load without it"):
        pipe.load_state_dict(state, assign=True)
    pipe.load_state_dict(state)
    assert_same(pipe.state_dict(), state, "state")


def test_a_model_without_a_mark():
    model = nn.Sequential()
    model.add_module("layer", nn.Linear(4, 4))
    model.add_module("last", nn.ReLU())
    with pytest.warns(match=r"annotate_split_points\(model, \{'layer': SplitPoint.END\}\)"):
        pipeline(model)
    annotate_split_points(model, {"layer": SplitPoint.END})
    assert pipeline(model).num_stages == 2
