"""The results of operations on fake tensors, each found once: forward of equal layers does the same work many times.

A model is traced in train and in eval mode, its sizes are found for another number of rows, and most models repeat a block.

    h.split(64, dim=2), h a fake float32[2, 16, 192]        computed
    the same in the next layer, and in the next trace       the tensors that were found before

So values of several nodes are one tensor, but an operation gives its argument only where it returns that. It would be wrong
once an operation changes the shape of such a tensor (`x.t_()`);
then nothing is shared any more, and what was found is found again.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pippy.ir.base.fake_mode import FakeMode
from pippy.ir.base.same_work import work_of
from pippy.ir.base.trees import tensors

_SHARED = (torch.Size, int, float, bool, str, type(None), torch.dtype, torch.device)


class ShapeChangedError(Exception):
    """An operation has changed the shape of a tensor that it was given."""


class FakeResults:
    """A mode for fake tensors, and the results that were found in it.

    >>> results = FakeResults()
    >>> x = results.mode.from_tensor(torch.ones(2, 3))
    >>> found = results.of(torch.relu, (x,), {}, lambda: torch.relu(x))
    >>> results.of(torch.relu, (x,), {}, lambda: 1 / 0) is found
    True
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, list[Any]] | None = {}

    @cached_property
    def mode(self) -> FakeMode:
        return FakeMode()

    def of(self, target: Any, args: Any, kwargs: Any, compute: Callable[[], Any]) -> Any:
        """The result of an operation, which ``compute`` gives if it is not known. Raises ShapeChangedError if it cannot be
        shared with others."""
        if self._results is None:
            return compute()
        arguments = list(tensors((args, kwargs)))
        work = work_of(target, args, kwargs) if all(map(_is_shared, arguments)) else None
        for known in self._results.get(work, ()) if work is not None else ():
            if isinstance(known, _Argument):
                return arguments[known.at]
            if not _holds_one_of(known, arguments):
                return known
        before = list(map(_shape, arguments))
        result = compute()
        if before != list(map(_shape, arguments)):
            raise ShapeChangedError
        if work is not None and _is_shared(result):
            at = next((at for at, each in enumerate(arguments) if each is result), None)
            if at is not None or not _holds_one_of(result, arguments):
                self._results.setdefault(work, []).append(result if at is None else _Argument(at))
        return result

    def share_nothing(self) -> None:
        """From now on all results are computed, from fake tensors that are new."""
        self._results = None
        self.__dict__.pop("mode", None)


@dataclass(frozen=True)
class _Argument:
    """Stands for the result of an operation that returns one of the tensors that it is given."""

    at: int


def _holds_one_of(result: Any, given: list[torch.Tensor]) -> bool:
    """Whether one of the tensors is in a result: the operation has returned it, or it was found for others before."""
    return any(each is other for each in tensors(result) for other in given)


def _is_shared(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_shared, value))
    return type(value) in _SHARED or (type(value) is FakeTensor and value.constant is None)


def _shape(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride() if tensor.layout is torch.strided else None
