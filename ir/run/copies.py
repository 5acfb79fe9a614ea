"""The copies of replicated parameters: before each run they are made equal, and after it each has the whole gradient."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from pippy.ir.base.names import named_state
from pippy.ir.base.sparse_tensors import equal
from pippy.ir.run.gradient_hooks import GradientHooks, accumulated, hooks_set_aside
from pippy.ir.run.shared_tensors import get_tensor
from pippy.ir.run.stage_backward import add_gradients

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
