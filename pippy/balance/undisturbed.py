"""Running parts of a model for the sake of measuring, after which it is as if they had not been run."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from pippy.ir.front.restore_attributes import restoring_attributes
from pippy.ir.names import named_state
from pippy.ir.random_state import untouched_random_state


class Undisturbed:
    """What `undisturbed` gives: the tensors that were seen to change, and how to watch those of one part.

    Copies are made of one part at a time, and kept only of what has changed, so that a large model needs no twin.
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
        copies = [tensor.detach().clone() for tensor in fresh]
        try:
            yield
        finally:
            for tensor, copy in zip(fresh, copies):
                if not torch.equal(tensor.detach(), copy):  # a NaN differs from itself: kept, and put back, for nothing
                    self._before[id(tensor)] = (tensor, copy)

    def restore(self) -> None:
        """Put the old numbers back."""
        for tensor, copy in self._before.values():
            tensor.data.copy_(copy)


@contextmanager
def undisturbed(*modules: nn.Module) -> Iterator[Undisturbed]:
    """Inside, parts of ``modules`` may be run; parameters, buffers, gradients, attributes and random states come back.

    >>> norm = nn.BatchNorm1d(2)
    >>> with undisturbed(norm) as state, state.watching(norm.buffers()):
    ...     _ = norm(torch.randn(8, 2))
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """
    tensors = {id(tensor): tensor for module in modules for _, tensor in named_state(module)}
    flags = [(part, part.training) for module in modules for part in module.modules()]
    gradients = [(tensor, tensor.grad) for tensor in tensors.values() if tensor.is_leaf]
    state = Undisturbed()
    with ExitStack() as stack:
        stack.enter_context(untouched_random_state())
        for module in modules:
            stack.enter_context(restoring_attributes(module, silent=True))
        stack.callback(state.restore)
        try:
            for tensor, _ in gradients:
                tensor.grad = None  # whatever a part adds by a backward of its own, it adds to nothing of the user's
            yield state
        finally:
            for tensor, gradient in gradients:
                tensor.grad = gradient
            for part, training in flags:
                part.training = training
