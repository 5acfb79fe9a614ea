"""A script that workers cannot import: `test_changed_scripts.py` runs it as a file. What it defines travels as code."""

import functools

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pippy import pipe_split


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x


square = Square.apply


@torch.library.custom_op("script_of_tests::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    return x.clone() ** 3


@cubed.register_fake
def _(x):
    return torch.empty_like(x)


def keep_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def five_times(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * 5 * x + 0 * cubed(x)  # an operator that names itself


cubed.register_autograd(five_times, setup_context=keep_input)
of_torch_ops = torch.ops.script_of_tests.cubed
namespace = torch.ops.script_of_tests


library = torch.library.Library("library_of_tests", "DEF")
library.define("cubed(Tensor x) -> Tensor")
library.impl("cubed", lambda x: x**3, "CompositeImplicitAutograd")


def of_a_library(x):
    return torch.ops.library_of_tests.cubed(x)


@functools.lru_cache
def numbers(n):
    return torch.arange(n, dtype=torch.float64)


@torch.jit.script
def scripted(output, target):
    return ((output - target) ** 2).mean()


class Whole(nn.Module):
    """Cannot be traced, so it is called as a whole."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) if x.sum() > -1e9 else x


class Cached(nn.Module):
    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033 - as users write it
    def numbers(self, n):
        return torch.arange(n, dtype=torch.float64)

    @functools.cache  # noqa: B019
    def by(self):
        return 2.5

    def forward(self, x):
        return x * self.numbers(4) * self.by() if x.sum() > -1e9 else x


class CachedLoss(nn.Module):
    @functools.lru_cache  # noqa: B019
    def by(self):
        return 3.0

    def forward(self, output, target):
        return F.mse_loss(output, target) * self.by()


class ScriptedLoss(nn.Module):
    def __init__(self, by: float):
        super().__init__()
        self.by = by

    def forward(self, output, target):
        return ((output - target) ** 2).mean() * self.by


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), middle, nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.last(self.middle(x))


class Traced(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


ROWS = {
    "a function once differentiable": (lambda: Traced(square), F.mse_loss),
    "that in a part kept whole": (lambda: Whole(square), F.mse_loss),
    "a custom operator": (lambda: Traced(cubed), F.mse_loss),
    "that by torch.ops": (lambda: Traced(lambda x: torch.ops.script_of_tests.cubed(x)), F.mse_loss),
    "an operator in a part kept whole": (lambda: Whole(cubed), F.mse_loss),
    "a packet of torch.ops": (lambda: Whole(of_torch_ops), F.mse_loss),
    "named in a part kept whole": (lambda: Whole(lambda x: torch.ops.script_of_tests.cubed(x)), F.mse_loss),
    "named by its namespace": (lambda: Whole(lambda x: namespace.cubed(x)), F.mse_loss),
    "cached methods": (lambda: Cached(), F.mse_loss),
    "a cached function": (lambda: Whole(lambda x: x * numbers(4)), F.mse_loss),
    "a scripted loss": (lambda: nn.Tanh(), scripted),
    "a scripted loss module": (lambda: nn.Tanh(), torch.jit.script(ScriptedLoss(3.0))),
    "a scripted function in a loss": (lambda: nn.Tanh(), lambda output, target: 2 * scripted(output, target)),
    "a custom function in a loss": (lambda: nn.Tanh(), lambda output, target: square(output - target).mean()),
    "a custom operator in a loss": (lambda: nn.Tanh(), lambda output, target: cubed(output - target).mean()),
    "a cached method in a loss": (lambda: nn.Tanh(), CachedLoss()),
}
