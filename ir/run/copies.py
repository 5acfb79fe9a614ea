"""The copies of replicated parameters, and the hooks on gradients, which are called with all of a backward's gradient.

Before each run copies are made equal, and after it each has the whole gradient.

Stages compute a gradient in parts: one for each micro-batch and each copy of a parameter. So hooks are set aside while they
do, and called at the end of a step, with the sum, as by torch.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from pippy.ir.base.names import named_state
from pippy.ir.base.trees import equal
from pippy.ir.run.in_place import get_tensor
from pippy.ir.run.stage_backward import add_gradients

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


Copies = Sequence[torch.Tensor]


def follow_owners(groups: Sequence[Copies]) -> None:
    """Make every copy equal to the first, the model's own parameter, which an optimizer or a loaded state may have changed."""
    with torch.no_grad():
        for owner, *copies in groups:
            for copy in copies:
                copy.requires_grad_(owner.requires_grad)
                if (copy.dtype, copy.device) != (owner.dtype, owner.device):
                    copy.data = owner.data.clone()
                elif not owner.is_meta and not equal(copy, owner):
                    copy.copy_(owner)


@contextmanager
def owners_in_place_of_copies(
    groups: Sequence[Mapping[str, str]], module_of: Callable[[str], nn.Module]
) -> Iterator[None]:
    """Inside, the stages compute with the model's own parameters in place of their copies.

    So a backward that the user calls leaves the gradients where the plain model has them.
    """
    swapped = [each for group in groups for each in _swaps(group, module_of)]
    for holder, name, owner, _ in swapped:
        setattr(holder, name, owner)
    try:
        yield
    finally:
        for holder, name, _, copy in swapped:
            setattr(holder, name, copy)


def _swaps(
    group: Mapping[str, str], module_of: Callable[[str], nn.Module]
) -> Iterator[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]:
    """For every attribute that is a copy: its module, its name, the model's own parameter and the copy."""
    (first, name), *others = group.items()
    owner = get_tensor(module_of(first), name)
    for stage, local in others:
        copy = get_tensor(module_of(stage), local)
        for place, tensor in list(named_state(module_of(stage))):
            if tensor is copy:
                path, _, leaf = place.rpartition(".")
                yield module_of(stage).get_submodule(path), leaf, owner, copy


@contextmanager
def whole_gradients(groups: Sequence[Copies]) -> Iterator[None]:
    """Inside, the copies start without gradients; at the end each copy has the sum of all their gradients.

    The gradient that the model's own parameter had before is set aside and added at the end. So gradients accumulate over
    several runs, and `model.zero_grad()` works for all copies. The hooks on it are called once, with the sum; so a parameter
    with hooks of which there are no copies may be a group, too.
    """
    before = [copies[0].grad for copies in groups]
    for copies in groups:
        for tensor in copies:
            tensor.grad = None
    try:
        with ExitStack() as stack:
            for copies in groups:
                stack.enter_context(hooks_set_aside(copies[0]))
            yield
        for copies, old in zip(groups, before):
            sum_gradients(copies, old)
    except BaseException:
        for copies, old in zip(groups, before):
            for tensor in copies:
                tensor.grad = old
        raise


def sum_gradients(copies: Copies, before: torch.Tensor | None = None) -> None:
    """Give every copy of a replicated parameter the sum of all copies' gradients, added in the order of the stages.

    The hooks of the first are called with the sum. It is added to ``before``.
    """
    total = None
    for tensor in copies:
        total = add_gradients(total, tensor.grad)
    if total is not None and GradientHooks.of(copies[0]):
        total = accumulated(copies[0], total, None if before is None else before.clone())
    else:
        total = add_gradients(before, total)
    copies[0].grad = total
    for tensor in copies[1:]:
        tensor.grad = None if total is None else total.clone()
