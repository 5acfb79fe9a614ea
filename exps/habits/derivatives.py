"""Layers that differentiate in forward: forces, gradient penalties, residuals of differential equations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import grad

from exps.habits.parts import WIDTH


class Differentiates(nn.Module):
    """Adds a derivative to its values."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer = what, nn.Linear(WIDTH, WIDTH)

    def meet(self, model: Any) -> None:
        self.root = [model]

    def forward(self, h: Any, x: Any) -> Any:
        return h + 0.2 * DERIVATIVES[self.what](self, h, x)


class Penalizes(Differentiates):
    """Adds a term of the loss that is made of a derivative."""

    def forward(self, h: Any, x: Any) -> Any:
        h = torch.tanh(self.layer(h))
        return h, 0.1 * PENALTIES[self.what](self, h, x)


def energy(part: Any, h: Any) -> Any:
    return torch.tanh(part.layer(h)).square().sum()


def second(part: Any, h: Any, x: Any) -> Any:
    """As in physics-informed losses."""
    (first,) = grad(energy(part, h), x, create_graph=True)
    return grad(first.sum(), x, create_graph=True)[0]


def unused(part: Any, h: Any, x: Any) -> Any:
    """Of two inputs one has no part in what is differentiated."""
    other = torch.zeros_like(x).requires_grad_()
    found, nothing = grad(energy(part, h), (x, other), create_graph=True, allow_unused=True)
    return found if nothing is None else found + nothing


def of_its_weight(part: Any, h: Any, x: Any) -> Any:
    return grad(energy(part, h), part.layer.weight, create_graph=True)[0].mean()


def of_the_first_weight(part: Any, h: Any, x: Any) -> Any:
    return grad(energy(part, h), part.root[0].first.weight, create_graph=True)[0].mean()


def inner_step(part: Any, h: Any, x: Any) -> Any:
    """A step on its weight, through which the loss is differentiated, as in MAML."""
    (gradient,) = grad(energy(part, h), part.layer.weight, create_graph=True)
    return torch.tanh(h @ (part.layer.weight - 0.1 * gradient).t())


# What is differentiated: of a part, its values and the model's input, which requires a gradient.
DERIVATIVES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "by values": lambda part, h, x: grad(energy(part, h), h, create_graph=True)[0],
    "by the input": lambda part, h, x: grad(energy(part, h), x, create_graph=True)[0],
    "by the input, in place": lambda part, h, x: grad(energy(part, h), x, create_graph=True)[0],
    "by the input, materialized": lambda part, h, x: grad(
        energy(part, h), x, create_graph=True, materialize_grads=True
    )[0],
    "by the input, a number": lambda part, h, x: grad(energy(part, h), x, retain_graph=True)[0],
    "by the input, given gradients": lambda part, h, x: grad(h, x, torch.ones_like(h), create_graph=True)[0],
    "by the input, unused": unused,
    "by its weight": of_its_weight,
    "by the first weight": of_the_first_weight,
    "inner step": inner_step,
}
PENALTIES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "gradient penalty": lambda part, h, x: (grad(h.sum(), x, create_graph=True)[0].norm(2, dim=-1) - 1).square().mean(),
    "second derivative": lambda part, h, x: second(part, h, x).square().mean(),
    "gradient of its weight": lambda part, h, x: (
        grad(h.square().mean(), part.layer.weight, create_graph=True)[0].square().sum()
    ),
}


def wants_gradient(part: str) -> bool:
    """Whether the model's input must require a gradient."""
    return "by the input" in part or part in ("term: gradient penalty", "term: second derivative")


PARTS: dict[str, Callable[[nn.Parameter], nn.Module]] = {
    **{f"grad: {what}": lambda _, what=what: Differentiates(what) for what in DERIVATIVES},  # type: ignore[misc]
    **{f"term: {what}": lambda _, what=what: Penalizes(what) for what in PENALTIES},  # type: ignore[misc]
}
