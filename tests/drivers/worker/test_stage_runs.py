"""A run of a stage holds what its backward reads, and not its outputs. Gradients are those of plain autograd to the bit."""

import copy
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pippy.drivers.worker.stage_call import StageCall
from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import tensors

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


@dataclass
class Named:
    one: torch.Tensor
    others: dict


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Stage(nn.Module):
    """Calls ``function`` with its linear layer and its inputs."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function, self.noted = nn.Linear(6, 6), function, []

    def forward(self, *inputs):
        return self.function(self, *inputs)


def hooked(self, x):
    y = self.linear(x)
    y.register_hook(lambda gradient: gradient * 3)
    return y


def retained(self, x):
    y = self.linear(x)
    y.retain_grad()
    return y


def changed_later(self, x):
    y = self.linear(x).clone()
    part = y[1:]
    y.mul_(3)
    return part, y


def twice(self, x):
    y = self.linear(x)
    return y, y


# What a stage gives, and how many of its outputs' storages are there once these are dropped.
STAGES = {
    "linear": (lambda self, x: self.linear(x), 0),
    "saved by its operation": (lambda self, x: self.linear(x).tanh(), 1),
    "saved by another": (lambda self, x: (lambda y: (y, y.cos()))(self.linear(x).neg()), 1),
    "a view": (lambda self, x: self.linear(x)[1:].t(), 0),
    "views of one": (lambda self, x: self.linear(x).chunk(3, -1), 0),
    "changed in place after a view of it": (changed_later, 0),
    "one tensor twice": (twice, 0),
    "an input": (lambda self, x: (x, self.linear(x)), 1),
    "a parameter": (lambda self, x: (self.linear.weight, self.linear(x)), 1),
    "no gradient": (lambda self, x: (self.linear(x), x.detach() > 0, x.argmax(-1)), 0),
    "containers": (lambda self, x: Named(self.linear(x), {"a": [self.linear(x), 7], "b": None}), 0),
    "a custom function": (lambda self, x: Double.apply(self.linear(x)), 0),
    "a hook": (hooked, 0),
    "a gradient that is retained": (retained, 0),
    "checkpointed": (lambda self, x: checkpoint(self.linear, x, use_reentrant=False), 0),
    "checkpointed by reentrance": (lambda self, x: checkpoint(self.linear, x, use_reentrant=True), 0),
    "sparse": (lambda self, x: self.linear(x).to_sparse(), 1),
}


def gradient_like(value):
    if isinstance(value, torch.Tensor):
        return torch.cos(value.detach().to_dense()) if value.requires_grad else None
    return None


def nested(value):
    """Gradients for outputs, in their structure."""
    if isinstance(value, Named):
        return nested(value.one), nested(tuple(value.others.values()))
    if isinstance(value, (tuple, list)):
        return tuple(map(nested, value))
    return gradient_like(value)


def storages(outputs):
    parts = [part for each in tensors(outputs) for part in ([each._values()] if each.is_sparse else [each])]
    return list({each.untyped_storage()._cdata: each.untyped_storage() for each in parts}.values())


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("name", STAGES)
def test_outputs_are_freed_while_their_backward_waits(name, halves):
    function, left = STAGES[name]
    stage = Stage(function)
    plain, x = copy.deepcopy(stage), torch.randn(4, 6)
    own = x.clone().requires_grad_()
    outputs = plain(own)
    gradients = [gradient_like(each) for each in tensors(outputs)]
    pairs = [pair for pair in zip(tensors(outputs), gradients) if pair[1] is not None]
    torch.autograd.backward(*map(list, zip(*pairs)))

    call = StageCall("stage", stage, None, (), backward=True, halves=halves)
    outputs, run = call.begin((leaf := x.requires_grad_(),), (leaf,), step=1)
    gradient = nested(outputs)
    there = [weakref.ref(each) for each in storages(outputs)]
    objects = [weakref.ref(each) for each in tensors(outputs) if not each.is_leaf]
    del outputs
    assert sum(each() is not None for each in there) == left
    assert left or not any(each() is not None for each in objects)
    (found,) = run.backward(gradient)
    assert torch.equal(found, own.grad)
    for mine, theirs in zip(stage.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_loss_is_freed_and_weighted():
    x = torch.randn(4, 6, requires_grad=True)
    call = StageCall("loss", Stage(lambda self, x: F.mse_loss(self.linear(x), x).reshape(1)), None, (), backward=True)
    loss, run = call.begin((x,), (x,), step=1)
    expected = torch.autograd.grad(call.module(x)[0] * 0.25, x)
    there = weakref.ref(loss.untyped_storage())
    del loss
    assert there() is None
    assert torch.equal(run.backward(0.25)[0], expected[0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda self, x: self.linear(x), r"the loss is float64\[4, 6\]; it must be a single number"),
        (lambda self, x: x.detach().sum(), "the loss does not require a gradient"),
        (lambda self, x: "loss", "the loss is 'loss'; it must be a single number"),
    ],
)
def test_what_is_no_loss_is_refused_as_before(function, message):
    x = torch.randn(4, 6, requires_grad=True)
    _, run = StageCall("loss", Stage(function), None, (), backward=True).begin((x,), (x,), step=1)
    with pytest.raises(StageError, match=message):
        run.backward(1.0)


def test_the_error_of_a_backward_says_what_the_outputs_were():
    x = torch.randn(4, 6, requires_grad=True)
    stage = Stage(lambda self, x: (self.linear(x), {"mask": x > 0}))
    _, run = StageCall("stage", stage, None, (), backward=True).begin((x,), (x,), step=1)
    with pytest.raises(StageError, match=r"outputs: \(float64\[4, 6\], dict\(bool\[4, 6\]\)\)\n"):
        run.backward((torch.ones(3, 5), None))
