"""How a Pipe is called, what it returns, and its refusals. Each test opens with the story of what went wrong."""

import collections
import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from pippy import (
    LossWrapper,
    Pipe,
    pipe_split,
    pipeline,
)
from pippy.ir.base.errors import (
    InputError,
    PippyError,
    StageError,
    TracingError,
)
from tests.comparisons import assert_same, assert_same_gradients, assert_same_step
from tests.regressions.common import Base, TwoLayers, X, check, half_square

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class OptionalBias(Base):
    def forward(self, x, bias=None):
        x = self.a(x)
        pipe_split()
        if bias is None:
            bias = self.b.bias
        return F.linear(x, self.b.weight, bias)


def test_an_optional_input_that_forward_asks_about():
    """The placeholder of an input was never None while tracing, so the branch for None was silently lost."""
    with pytest.raises(InputError, match=r"'bias' is None(.|\n)*concrete_args=\{'bias': None\}"):
        pipeline(OptionalBias())(X)
    bias, model = torch.randn(4), OptionalBias()
    assert_same(pipeline(model)(X, bias), model(X, bias), "with a bias")
    check(OptionalBias(), X, concrete_args={"bias": None})


class BothMissing(Base):
    def forward(self, x, mask=None, scale=None, shift=None):
        x = self.a(x)
        pipe_split()
        if mask is None and scale is None:
            return self.b(x) * 2
        return self.b(x) if shift is None else self.b(x) + shift


def test_optional_inputs_that_forward_asks_about_together():
    """None of them alone changed what was traced, so the branch for all of them missing was lost."""
    with pytest.raises(InputError, match=r"'mask', 'scale', 'shift' is None|'shift', 'mask', 'scale' is None"):
        pipeline(BothMissing())(X)
    check(BothMissing(), X, concrete_args={"mask": None, "scale": None, "shift": None})


class OptionalMask(Base):
    def forward(self, x, mask=None, scale=None):
        x = self.a(x)
        pipe_split()
        q = x.view(1, 6, 4)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=scale).view(6, 4)


def test_an_optional_input_that_is_only_passed_on():
    """Refusing every None would refuse this one for nothing."""
    check(OptionalMask(), X)
    mask, model = torch.randn(6, 6), OptionalMask()
    assert_same(pipeline(model)(X, mask=mask), model(X, mask), "with a mask")


class TwoConsumers(Base):
    def forward(self, x, y):
        z = self.a(x) * y
        pipe_split()
        return self.b(z) + x


def test_inputs_from_one_graph():
    """Their common graph was run backward once for each stage that uses them."""
    model = TwoConsumers()
    plain, pipe = copy.deepcopy(model), pipeline(model, half_square)
    first = nn.Linear(4, 4)
    twin, target = copy.deepcopy(first), torch.randn(6, 4)
    hidden = first(X)
    pipe(hidden, hidden * 2, target)
    hidden = twin(X)
    half_square(plain(hidden, hidden * 2), target).backward()
    assert_same(first.weight.grad, twin.weight.grad, "gradient through the inputs")


class Keywords(Base):
    def forward(self, x, **more):
        x = self.a(x)
        pipe_split()
        return self.b(x) * more["scale"]


def test_keyword_inputs_with_a_loss():
    """The target came after ``**more`` in the generated signature."""
    model, target = Keywords(), torch.randn(6, 4)
    assert_same(
        pipeline(model, half_square)(X, target, scale=2.0), half_square(model(X, scale=2.0), target).detach(), "loss"
    )


class Names(nn.Module):
    """Children and inputs with the names that the Pipe itself uses."""

    def __init__(self):
        super().__init__()
        self.graph, self.code, self.submod_0, self._loss, self.target = (nn.Linear(4, 4) for _ in range(5))
        self.graph_ = nn.Linear(4, 4)

    def forward(self, submod_1, _loss, target):
        x = self.graph(submod_1) + self._loss(_loss)
        pipe_split()
        return self.code(self.submod_0(x)) + self.target(target) + self.graph_(x)


def test_names_that_the_pipe_uses_itself():
    """They clashed with those of calls, of graph modules and of the loss."""
    model = Names()
    pipe = check(model, X, X * 2, X * 3)
    assert pipe.get_grad("_loss.weight") is not None
    assert {pipe.remap_qualname(place) for name in model.state_dict() for place in pipe.stage_qualnames(name)} == {
        *model.state_dict()
    }
    assert_same(pipe(X, target_1=X, _loss=X, target=X), pipe(X, X, X, X), "by name")


class Numbered(Base):
    def forward(self, x, n_1, n):
        x = self.a(x) * n_1
        pipe_split()
        return self.b(x) * n


def test_a_concrete_argument_beside_one_that_is_named_like_its_placeholder():
    """fx names a specialized argument `n_1`, which was taken for the other."""
    model = Numbered()
    assert_same(pipeline(model, concrete_args={"n": 2})(X, 3.0), model(X, 3.0, 2), "outputs")
    with pytest.raises(TracingError, match=r"no argument of that name; did you mean 'n_1'"):
        pipeline(model, concrete_args={"n_11": 2})


@pytest.mark.parametrize("result", [None, 1.0, (torch.ones(1), 2)])
def test_a_loss_that_is_no_tensor(result):
    """It failed somewhere inside, with somebody else's error."""
    with pytest.raises(StageError, match="it must be a single number"):
        pipeline(TwoLayers(), lambda output, target: result)(X, X)


def test_children_that_begin_in_place():
    """A child of a Sequential changed the leaf that it was given."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), nn.ReLU(inplace=True))
    plain, target = copy.deepcopy(model), torch.randn(6, 4)
    assert_same_step(Pipe.from_sequential(model, half_square), plain, half_square, (X,), target)


class Output(collections.OrderedDict):
    """A model's output as libraries make it: a dict whose keys are attributes too."""

    def __getattr__(self, name):
        return self[name]


@dataclasses.dataclass
class Fields(collections.OrderedDict):
    loss: Any = None
    logits: Any = None

    def __post_init__(self):
        self.update({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


@pytest.mark.parametrize("make", [Output, Fields, lambda **items: collections.OrderedDict(items)])
def test_outputs_of_a_class_of_their_own(make):
    """They came back as plain dicts."""

    class Model(Base):
        def forward(self, x):
            x = self.a(x)
            pipe_split()
            logits = self.b(x)
            return make(loss=(logits**2).mean(), logits=logits)

    model = Model()
    plain, pipe = copy.deepcopy(model), pipeline(model)
    expected, found = plain(X), pipe(X)
    assert type(found) is type(expected)
    assert_same(found["loss"], expected["loss"].detach(), "loss")
    assert_same(found["logits"], expected["logits"].detach(), "logits")
    expected["loss"].backward()
    assert_same_gradients(pipe, plain)


class Point(collections.namedtuple("Point", ["loss", "y"])):
    pass


@pytest.mark.parametrize("spec", ["loss", 0, (True, False), -2])
def test_a_loss_inside_a_named_tuple(spec):
    """Its fields could not be named."""

    class Model(Base):
        def forward(self, x):
            x = self.a(x)
            pipe_split()
            return Point((self.b(x) ** 2).mean(), x)

    model = Model()
    plain, pipe = copy.deepcopy(model), pipeline(model, output_loss_value_spec=spec)
    expected = plain(X)
    expected.loss.backward()
    assert_same(pipe(X).loss, expected.loss.detach(), "loss")
    assert_same_gradients(pipe, plain)


class TakesWeights(LossWrapper):
    def forward(self, x, targets, weight=2.0):
        return self.loss_fn(self.module(x), targets) * weight


def test_a_loss_wrapper_with_further_inputs():
    model = TakesWeights(TwoLayers(), nn.MSELoss())
    plain, target = copy.deepcopy(model), torch.randn(6, 4)
    pipe = pipeline(model)
    loss = plain(X, target, weight=3.0)
    loss.backward()
    assert_same(pipe(X, target, weight=3.0), loss.detach(), "loss")
    assert_same_gradients(pipe, plain)


def test_a_wrapper_without_a_forward_says_so_and_nothing_else():
    with pytest.raises(TracingError) as caught:
        pipeline(LossWrapper(TwoLayers(), nn.MSELoss()))
    assert "has no forward" in str(caught.value)
    assert "concrete_args" not in str(caught.value)


class Specialized(Base):
    def forward(self, x, mask=None, scale=None):
        x = self.a(x) if mask is None else self.a(x) * mask
        pipe_split()
        return self.b(x) if scale is None else self.b(x) * scale


def test_concrete_arguments_keep_their_place():
    """A value given for one went to the next argument without a word."""
    model = Specialized()
    pipe = pipeline(model, concrete_args={"mask": None})
    assert_same(pipe(X, None, X), model(X, None, X), "by position")
    assert_same(pipe(X, scale=X), model(X, scale=X), "by name")
    with pytest.raises(InputError, match=r"'mask' is float64.6, 4., but the model was traced with mask=None"):
        pipe(X, X)


@pytest.mark.parametrize(
    "call",
    [
        lambda pipe: pipe.load_state_dict(3),
        lambda pipe: pipe.stage(7),
        lambda pipe: pipe.stage("foo"),
        lambda pipe: pipe.remap_qualname(3),
        lambda pipe: pipeline(pipe),
    ],
)
def test_mistakes_get_errors_of_the_librarys_own(call):
    with pytest.raises(PippyError):
        call(pipeline(TwoLayers()))
