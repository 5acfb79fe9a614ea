"""Restores a model after its parts have run to be measured."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from pippy.ir.base.names import named_state
from pippy.ir.base.sparse_tensors import equal
from pippy.ir.run.random_state import untouched_random_state
from pippy.ir.trace.restore_attributes import restoring_attributes


class ChangedTensors:
    """The tensors that changed while they were watched, with copies of their numbers of before.

    Only a tensor that changes is copied, and one part is watched at a time, so a large model is never copied as a whole.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def changed(self) -> set[int]:
        """The ids of the tensors that have changed."""
        return set(self._before)

    @contextmanager
    def watching(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, these tensors may be changed; the first change of each is remembered."""
        fresh = [tensor for tensor in tensors if id(tensor) not in self._before]
        copies, versions = [tensor.detach().clone() for tensor in fresh], [tensor._version for tensor in fresh]
        try:
            yield
        finally:
            for tensor, copy, version in zip(fresh, copies, versions):
                # A NaN differs from itself: kept, and put back, for nothing.
                if tensor._version != version if tensor.is_meta else not equal(tensor.detach(), copy):
                    self._before[id(tensor)] = (tensor, copy)

    def restore(self) -> None:
        """Copy the old numbers back."""
        for tensor, copy in self._before.values():
            tensor.data.copy_(copy)


@contextmanager
def restoring_model(*modules: nn.Module) -> Iterator[ChangedTensors]:
    """Inside, parts of ``modules`` may be run; afterwards parameters, buffers, gradients, attributes and random states are
    what they were.

    >>> norm = nn.BatchNorm1d(2)
    >>> with restoring_model(norm) as state, state.watching(norm.buffers()):
    ...     _ = norm(torch.randn(8, 2))
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """
    tensors = {id(tensor): tensor for module in modules for _, tensor in named_state(module)}
    flags = [(part, part.training) for module in modules for part in module.modules()]
    gradients = [(tensor, tensor.grad) for tensor in tensors.values() if tensor.is_leaf]
    state = ChangedTensors()
    with ExitStack() as stack:
        stack.enter_context(untouched_random_state())
        for module in modules:
            stack.enter_context(restoring_attributes(module, silent=True))
        stack.callback(state.restore)
        try:
            for tensor, _ in gradients:
                tensor.grad = None  # a part that runs a backward of its own adds to no gradient of the user's
            yield state
        finally:
            for tensor, gradient in gradients:
                tensor.grad = gradient
            for part, training in flags:
                part.training = training
