"""Layers and hooks that read a parameter of another layer by a plain reference, so that no call passes it on."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from exps.habits.parts import WIDTH

ROOTS: dict[str, Any] = {}  # a global by which layers find the model


class Meets(nn.Module):
    """A layer that learns which model it is part of, and does not register it as a child."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer = what, nn.Linear(WIDTH, WIDTH)

    def meet(self, model: Any) -> None:
        self.root = [model]


class Reads(Meets):
    """Multiplies by the weight of the model's first layer."""

    def meet(self, model: Any) -> None:
        self.read = READ[self.what](model)

    def forward(self, h: Any, x: Any) -> Any:
        return torch.tanh(self.layer(h)) + 0.5 * h @ self.read()


class Parent:
    """Hides the model in an object that is no module."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self) -> Any:
        return self.model.first.weight


def by_global(model: Any) -> Callable[[], Any]:
    ROOTS["model"] = model
    return read_global


def read_global() -> Any:
    return ROOTS["model"].first.weight


def by_weak_reference(model: Any) -> Callable[[], Any]:
    found = weakref.ref(model)
    return lambda: found().first.weight  # type: ignore[union-attr]


# How a layer reads the weight, of the model.
READ: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "closure": lambda model: lambda: model.first.weight,
    "weight itself": lambda model: lambda weight=model.first.weight: weight,  # type: ignore[misc]
    "object": Parent,
    "bound method": lambda model: Parent(model).__call__,
    "global": by_global,
    "weak reference": by_weak_reference,
    "by name": lambda model: lambda: model.get_parameter("first.weight"),
    "last's": lambda model: lambda: model.last.weight,
    "detached": lambda model: lambda: model.first.weight.detach(),
    "data": lambda model: lambda: model.first.weight.data,
}


class Hooked(Meets):
    """Has a hook that reads another layer's weight."""

    def put_on(self) -> RemovableHandle:
        return HOOKS[self.what](self.layer, self.root[0])

    def forward(self, h: Any, x: Any) -> Any:
        return torch.tanh(self.layer(h))


def multiplied(model: Any) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda module, arguments, output: output + 0.5 * output @ model.first.weight


def before(model: Any) -> Callable[[nn.Module, Any], Any]:
    return lambda module, arguments: (arguments[0] @ model.first.weight,)


def scaled(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * model.first.weight.detach().norm()


def scaled_afterwards(model: Any) -> Callable[[Tensor], None]:
    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= model.first.weight.detach().norm()

    return scale


def scaled_backward(model: Any) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda module, gradients, _: tuple(each * model.last.weight.detach().norm() for each in gradients)


# How a hook of each kind is put on a linear layer of a model.
HOOKS: dict[str, Callable[[nn.Linear, Any], RemovableHandle]] = {
    "forward": lambda layer, model: layer.register_forward_hook(multiplied(model)),
    "before forward": lambda layer, model: layer.register_forward_pre_hook(before(model)),
    "gradient": lambda layer, model: layer.weight.register_hook(scaled(model)),
    "afterwards": lambda layer, model: layer.weight.register_post_accumulate_grad_hook(scaled_afterwards(model)),
    "backward": lambda layer, model: layer.register_full_backward_hook(scaled_backward(model)),
}


class HooksValue(Meets):
    """A hook on a value reads another layer's weight."""

    def forward(self, h: Any, x: Any) -> Any:
        h = torch.tanh(self.layer(h))
        if h.requires_grad:
            h.register_hook(scaled(self.root[0]))
        return h


class Decays(Meets):
    """Its term of the loss reads the weights of the first layer, or of all layers."""

    def forward(self, h: Any, x: Any) -> Any:
        model = self.root[0]
        read = [model.first.weight] if self.what == "first" else list(model.parameters())
        return torch.tanh(self.layer(h)), 0.01 * sum(each.square().sum() for each in read)


PARTS: dict[str, Callable[[nn.Parameter], nn.Module]] = {
    **{f"reads: {what}": lambda _, what=what: Reads(what) for what in READ},  # type: ignore[misc]
    **{f"hook reads: {what}": lambda _, what=what: Hooked(what) for what in HOOKS},  # type: ignore[misc]
    "hook reads: value": lambda _: HooksValue("value"),
    "term: decay of the first": lambda _: Decays("first"),
    "term: decay of all": lambda _: Decays("all"),
}
