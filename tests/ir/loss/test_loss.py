"""Losses: as a module, as a function, as one of the model's own outputs; and those that cannot work."""

import copy
import functools
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from pippy import TrivialLossWrapper, pipe_split, pipeline
from pippy.ir.base.errors import InputError, LossError, StageError
from tests.comparisons import assert_same, assert_same_gradients


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x)


class Found(NamedTuple):
    logits: Any
    parts: Any


class Returns(Net):
    """Returns whatever `make` makes of a loss and logits."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        logits = super().forward(x)
        return self.make((logits**2).mean(), logits)


def branching_loss(output, target, kind="square"):
    if kind == "square" and output.shape == target.shape:
        return sum(((one - other) ** 2).mean() for one, other in zip(output, target))
    raise AssertionError


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("setting", torch.tensor(1.0))

    def forward(self, output, target):
        return ((output - target) ** 2).mean() * self.scale


X, T = torch.randn(6, 4), torch.randn(6, 4)


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.MSELoss(),
        F.mse_loss,
        branching_loss,
        functools.partial(branching_loss, kind="square"),
        lambda output, target: (output - target).abs().sum(),
        fx.symbolic_trace(lambda output, target: ((output - target) ** 2).mean()),
        Learned(),
    ],
)
def test_a_loss_is_anything_that_can_be_called_with_output_and_target(loss_fn):
    model = Net()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, loss_fn)
    expected = loss_fn(plain(X), T)
    expected.backward()
    if isinstance(loss_fn, nn.Module):
        gradients = [parameter.grad.clone() for parameter in loss_fn.parameters()]
        loss_fn.zero_grad()
    assert_same(pipe(X, T), expected.detach(), "loss")
    assert_same(pipe(X, target=T), expected.detach(), "loss by name")
    plain.zero_grad()
    (2 * loss_fn(plain(X), T)).backward()
    if isinstance(loss_fn, nn.Module):
        assert_same([p.grad for p in loss_fn.parameters()], [4 * g for g in gradients], "gradient of the loss itself")
    torch.testing.assert_close(pipe.get_grad("a.weight"), plain.a.weight.grad)


def test_what_a_loss_learns_is_in_the_state_dict_and_its_settings_are_not():
    loss_fn = Learned()
    pipe = pipeline(Net(), loss_fn)
    assert [*pipe.state_dict()] == [*Net().state_dict(), "_loss.scale"]
    assert dict(pipe.named_parameters())["_loss.scale"] is loss_fn.scale
    pipe.load_state_dict({**pipe.state_dict(), "_loss.scale": torch.tensor(5.0)})
    assert loss_fn.scale == 5.0
    assert [*pipeline(Net(), nn.CrossEntropyLoss(weight=torch.ones(4))).state_dict()] == [*Net().state_dict()]


class Decorrelate(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, output, target):
        return ((output @ self.layer.weight - target) ** 2).mean()


def test_a_loss_may_share_a_parameter_with_the_model():
    model = Net().double()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, Decorrelate(model.a))
    assert pipe.replicated_params == [
        {"submod_0": "a.weight", "_loss": "layer.weight"},
        {"submod_0": "a.bias", "_loss": "layer.bias"},
    ]
    assert [*pipe.state_dict()] == [*plain.state_dict()]
    loss = Decorrelate(plain.a)(plain(X.double()), T.double())
    loss.backward()
    assert_same(pipe(X.double(), T.double()), loss.detach(), "loss")
    torch.testing.assert_close(pipe.get_grad("a.weight"), plain.a.weight.grad)


@pytest.mark.parametrize(
    ("make", "spec"),
    [
        (lambda loss, logits: (loss, logits), (True, False)),
        (lambda loss, logits: (loss, logits), 0),
        (lambda loss, logits: [logits, loss], [False, True]),
        (lambda loss, logits: [logits, loss], -1),
        (lambda loss, logits: {"loss": loss, "logits": logits}, None),
        (lambda loss, logits: {"cost": loss, "logits": logits}, "cost"),
        (lambda loss, logits: {"cost": loss, "logits": logits}, {"cost": True, "logits": False}),
        (lambda loss, logits: (logits, {"cost": loss}), (False, {"cost": True})),
        (lambda loss, logits: loss, True),
        (lambda loss, logits: (loss, 3, None), 0),
        (lambda loss, logits: Found(logits, {"cost": loss, "all": [logits]}), {"parts": "cost"}),
        (lambda loss, logits: Found(logits, [logits, {"cost": loss}]), Found(None, [False, {"cost": True}])),
    ],
)
def test_a_model_may_return_its_loss(make, spec):
    model = Returns(make).double()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, output_loss_value_spec=spec)
    expected = plain(X.double())
    make((plain.b(plain.a(X.double())) ** 2).mean(), 0)
    (plain.b(plain.a(X.double())) ** 2).mean().backward()
    found = pipe(X.double())
    assert type(found) is type(expected)
    assert_same(found, torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, expected), "outputs")
    assert_same_gradients(pipe, plain)


def test_a_dict_with_a_loss_can_be_told_that_it_has_none():
    model = Returns(lambda loss, logits: {"loss": loss, "logits": logits})
    pipe = pipeline(model, output_loss_value_spec=False)
    pipe(X)["loss"].backward()
    assert model.a.weight.grad is not None


@dataclass
class ModelOutput(OrderedDict):
    """As those of transformers: fields that are items too, unless they are None."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        self.update({each.name: getattr(self, each.name) for each in fields(self)})


@pytest.mark.parametrize(
    "make",
    [
        lambda loss, logits: {"loss": None, "logits": logits},
        lambda loss, logits: OrderedDict(loss=None, logits=logits),
        lambda loss, logits: ModelOutput(None, logits),
        lambda loss, logits: ModelOutput(logits=logits),
    ],
)
def test_a_loss_of_none_is_no_loss(make):
    model = Returns(make)
    pipe = pipeline(model)
    assert pipe.loss is None
    torch.testing.assert_close(pipe(X)["logits"], model(X)["logits"])
    loss = pipeline(model, lambda output, target: F.mse_loss(output["logits"], target))(X, T)
    torch.testing.assert_close(loss, F.mse_loss(model(X)["logits"], T))
    with pytest.raises(LossError, match=r"'loss' marks what is None .*; leave the specification out"):
        pipeline(model, output_loss_value_spec="loss")
    assert pipeline(model, output_loss_value_spec=False).loss is None


@dataclass
class Answers:
    loss: torch.Tensor
    logits: torch.Tensor


def test_a_dataclass_with_a_loss_is_understood_by_itself():
    model = Returns(Answers)
    pipe, expected = pipeline(model), model(X).loss
    torch.testing.assert_close(pipe(X).loss, expected.detach())
    assert pipe.get_grad("a.weight") is not None


def test_a_trivial_loss_wrapper_is_a_model_with_its_loss():
    wrapper = TrivialLossWrapper(Net(), F.mse_loss)
    pipe = pipeline(wrapper)
    expected = F.mse_loss(wrapper.module(X), T)
    assert_same(pipe(X, T), expected.detach(), "loss")
    assert pipe.get_grad("module.a.weight") is not None
    with pytest.raises(InputError, match=r"pipe\(x, targets\)"):
        pipe(X)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda output: output, "cannot be called as loss_fn(output, target): too many positional arguments"),
        (lambda output, target, weight: output, "missing a required argument: 'weight'"),
    ],
)
def test_a_loss_that_needs_what_is_not_there_is_refused(loss_fn, words):
    with pytest.raises(LossError) as caught:
        pipeline(Net(), loss_fn)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ((True, True), "marks 2 values"),
        ((False, False), "marks 0 values"),
        ((True,), "does not have the shape of what the model returns, a tuple of 2"),
        ({"loss": True}, "does not have the shape"),
        (7, "names nothing"),
        ("loss", "names nothing"),
        (True, "marks a tuple of 2 as the loss; mark one value"),
        ((False, {"x": True}), "tracing does not know what that is made of"),
    ],
)
def test_a_specification_that_does_not_fit_is_refused(spec, words):
    with pytest.raises(LossError) as caught:
        pipeline(Returns(lambda loss, logits: (loss, logits)), output_loss_value_spec=spec)
    assert words in str(caught.value)


def test_a_loss_that_no_stage_computes_is_refused():
    with pytest.raises(LossError, match="marks 3 as the loss"):
        pipeline(Returns(lambda loss, logits: (loss, 3)), output_loss_value_spec=(False, True))


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.MSELoss(reduction="none"), "it must be a single number"),
        (lambda output, target: output.detach().sum(), "does not require a gradient"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_refused_when_it_is_seen(loss_fn, words):
    with pytest.raises(StageError, match=f"backward of _loss failed(.|\n)*{words}"):
        pipeline(Net(), loss_fn)(X, T)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "the loss's 'target' is missing; call the Pipe as pipe(x, target)"),
        ((X,), {}, "missing a required argument: 'x'"),
        ((X, T, T), {}, "too many positional arguments; the Pipe is called as pipe(x, target)"),
        ((X, T), {"scale": 1}, "unexpected keyword argument 'scale'"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_given(args, kwargs, words):
    with pytest.raises(InputError) as caught:
        pipeline(Net(), nn.MSELoss())(*args, **kwargs)
    assert words in str(caught.value)
