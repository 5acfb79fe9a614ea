"""Layers that call an autograd function of their own, which they reach in every way that Python has.

The backward of each function is not the derivative of its forward: a backward that is dropped gives other gradients.
"""

from collections.abc import Callable
from functools import lru_cache, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from exps.habits.parts import WIDTH


class Square(torch.autograd.Function):
    """Saves its input, as PyTorch's tutorial on custom functions does."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x * gradient


class SetsUp(torch.autograd.Function):
    """Has a `setup_context` of its own."""

    @staticmethod
    def forward(x: Any, factor: float) -> Any:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.factor = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.factor * 1.5, None


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.tanh()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 0.5


class Multiply(torch.autograd.Function):
    """Takes a weight beside its values."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), 2 * x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class ClampOnly(torch.autograd.Function):
    """Passes gradients straight through, as quantizers do."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round(decimals=1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class Reverse(torch.autograd.Function):
    """Turns gradients around, as domain adaptation does; the result is a view."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.neg()


class Both(torch.autograd.Function):
    """Gives two results; the second is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x * 2, signs

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        return gradient * 3


@torch.library.custom_op("habits::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * 3)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


square = Square.apply
by_name: dict[str, Any] = {"square": Square.apply}
in_order = [torch.tanh, Square.apply]
bound = partial(Square.apply)


def with_default(h: Any, function: Any = Square.apply) -> Any:
    return function(h)


def with_named_default(h: Any, *, function: Any = Square.apply) -> Any:
    return function(h)


def closing_over(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda h: function(h)


def made_inside(h: Any) -> Any:
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * 3

    return Inside.apply(h)


def from_local_name(h: Any) -> Any:
    """As PyTorch's tutorial writes it."""
    p3 = Square.apply
    return p3(h)


def both(h: Any) -> Any:
    value, signs = Both.apply(h)
    return value + 0.1 * signs


# Ways to reach the function, of which the layer knows nothing.
WAYS: dict[str, Callable[[Any], Any]] = {
    "class": lambda h: Square.apply(h),
    "alias": lambda h: square(h),
    "local name": from_local_name,
    "dict": lambda h: by_name["square"](h),
    "list": lambda h: reduce(lambda value, function: function(value), in_order, h),
    "partial": lambda h: bound(h),
    "default": lambda h: with_default(h),
    "named default": lambda h: with_named_default(h),
    "closure": closing_over(Square.apply),
    "made inside": made_inside,
    "getattr": lambda h: getattr(Square, "app" + "ly")(h),
    "map": lambda h: next(map(square, (h,))),
    "set up": lambda h: SetsUp.apply(h, 1.2),
    "once": lambda h: Once.apply(h),
    "straight through": lambda h: ClampOnly.apply(h),
    "reverse": lambda h: Reverse.apply(h),
    "both": both,
    "custom operator": lambda h: doubled(h),
    "scripted": lambda h: scripted(h),
}


class Calls(nn.Module):
    """A layer before, so that a gradient that is lost is missed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Any, x: Any) -> Any:
        return h + WAYS[self.way](torch.tanh(self.layer(h)))


class HasAttribute(nn.Module):
    """The function is an attribute of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), Square.apply

    def forward(self, h: Any, x: Any) -> Any:
        return h + self.function(torch.tanh(self.layer(h)))


class HasDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.functions = nn.Linear(WIDTH, WIDTH), {"square": Square.apply}

    def forward(self, h: Any, x: Any) -> Any:
        return h + self.functions["square"](torch.tanh(self.layer(h)))


class HasClassAttribute(nn.Module):
    function = staticmethod(Square.apply)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Any, x: Any) -> Any:
        return h + self.function(torch.tanh(self.layer(h)))


class HasDefault(nn.Module):
    """The function is a default of forward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Any, x: Any, function: Any = Square.apply) -> Any:
        return h + function(torch.tanh(self.layer(h)))


class Weighs(nn.Module):
    """The function takes a parameter of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, h: Any, x: Any) -> Any:
        return torch.tanh(Multiply.apply(h, self.weight))


class Caches(nn.Module):
    """A method under `lru_cache` makes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    @lru_cache(maxsize=4)  # noqa: B019 - the habit itself
    def positions(self, width: int) -> Tensor:
        return torch.linspace(0, 1, width, dtype=torch.float64)

    def forward(self, h: Any, x: Any) -> Any:
        return torch.tanh(self.layer(h)) + self.positions(WIDTH)


PARTS: dict[str, Callable[[nn.Parameter], nn.Module]] = {
    **{f"function: {way}": lambda _, way=way: Calls(way) for way in WAYS},  # type: ignore[misc]
    "function: attribute": lambda _: HasAttribute(),
    "function: attribute, dict": lambda _: HasDict(),
    "function: class attribute": lambda _: HasClassAttribute(),
    "function: forward's default": lambda _: HasDefault(),
    "function: weight": lambda _: Weighs(),
    "cached method": lambda _: Caches(),
}
