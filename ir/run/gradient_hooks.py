"""Hooks on the gradient of a parameter, which are called with all of a backward's gradient, as by torch.

Stages compute a gradient in parts: one for each micro-batch and each copy of a parameter. So hooks are set aside while they
do, and called at the end of a step, with the sum.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

Model = TypeVar("Model")
Hook = Callable[..., Any]


@dataclass(frozen=True)
class GradientHooks:
    """The hooks of ``register_hook``, and those of ``register_post_accumulate_grad_hook``, of one parameter.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> handle = weight.register_hook(lambda gradient: gradient * 2)
    >>> hooks = GradientHooks.of(weight)
    >>> handle.remove()
    >>> hooks.accumulated(weight, torch.ones(2), before=torch.ones(2))
    tensor([3., 3.])
    """

    on_gradient: tuple[Hook, ...] = ()
    after_accumulation: tuple[Hook, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "GradientHooks":
        """Those that a tensor has."""
        own: Any = tensor
        return cls(tuple((own._backward_hooks or {}).values()), tuple((own._post_accumulate_grad_hooks or {}).values()))

    def __bool__(self) -> bool:
        return bool(self.on_gradient or self.after_accumulation)

    def put_on(self, parameter: Any) -> list[Any]:
        """Register them on a parameter; gives what removes each of them."""
        handles = [parameter.register_hook(hook) for hook in self.on_gradient]
        return handles + [parameter.register_post_accumulate_grad_hook(hook) for hook in self.after_accumulation]

    def accumulated(
        self, parameter: torch.Tensor, gradient: torch.Tensor, before: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """As the function `accumulated`, for a parameter that has no hooks of its own."""
        handles = self.put_on(parameter)
        try:
            return accumulated(parameter, gradient, before)
        finally:
            for handle in handles:
                handle.remove()


def accumulated(
    parameter: torch.Tensor, gradient: torch.Tensor, before: torch.Tensor | None = None
) -> torch.Tensor | None:
    """What `.grad` of a parameter is after a backward with this gradient, if it was ``before``, whose memory may be used.

    torch itself calls the hooks of the parameter, and checks what they give. `.grad` is None at the end.
    """
    parameter.grad = before
    try:
        torch.autograd.backward(parameter, gradient)
        return parameter.grad
    finally:
        parameter.grad = None


@contextmanager
def hooks_set_aside(parameter: torch.Tensor) -> Iterator[None]:
    """Inside, a parameter has no hooks on its gradient."""
    own: Any = parameter
    dicts = [each for each in (own._backward_hooks, own._post_accumulate_grad_hooks) if each]
    hooks = [dict(each) for each in dicts]
    for each in dicts:
        each.clear()  # it stays the same dict, by which a hook is removed
    try:
        yield
    finally:
        for each, before in zip(dicts, hooks):
            each.update(before)


def deep_copy(model: Model) -> Model:
    """A copy of a model, or of a list of layers, with copies of the hooks of its parameters, which `copy.deepcopy` drops.

    >>> linear = nn.Linear(2, 2)
    >>> handle = linear.bias.register_hook(lambda gradient: gradient * 2)
    >>> len(GradientHooks.of(deep_copy(linear).bias).on_gradient)
    1
    """
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(model, memo)
    modules: Any = (model,) if isinstance(model, nn.Module) else model
    parameters = {id(each): each for module in modules if isinstance(module, nn.Module) for each in module.parameters()}
    for key, parameter in parameters.items():
        hooks = copy.deepcopy(GradientHooks.of(parameter), memo)
        hooks.put_on(memo[key])
    return copied
