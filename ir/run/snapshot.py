"""Tensors at one time, to tell later which of them have been changed in place, and what they were.

Torch counts the changes of a tensor in place. It does not count what some kernels do to the statistics of a batch
normalization, nor changes of a tensor that was made in inference mode. Of these a copy can tell.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

from pippy.ir.run.shared_tensors import memory_of

_Key = TypeVar("_Key", bound=Hashable)


class Snapshot(Generic[_Key]):
    """Tensors by their keys, with copies of those that are ``copied``. With ``compares``, these tell of changes, too.

    The mapping is kept, and must stay as it is: it is not copied, as a snapshot is made for each computation.

    >>> x = torch.zeros(2)
    >>> snapshot = Snapshot({"x": x}, copied=["x"])
    >>> x += 1
    >>> snapshot.changed()
    ['x']
    >>> snapshot.restore()
    >>> x
    tensor([0., 0.])
    """

    __slots__ = ("compares", "copies", "tensors", "versions")

    def __init__(
        self, tensors: Mapping[_Key, torch.Tensor], copied: Collection[_Key] = (), compares: bool = False
    ) -> None:
        self.tensors, self.compares = tensors, compares
        self.versions = versions_of(tensors.values())
        self.copies = dict(zip(copied, copies_of([self.tensors[key] for key in copied]))) if copied else {}

    def changed(self, now: Mapping[_Key, torch.Tensor] | None = None) -> list[_Key]:
        """The keys of the tensors that were changed since. Those that were replaced are others ``now``."""
        if now is None and not self.compares and versions_of(self.tensors.values()) == self.versions:
            return []  # soon, as it is asked after each computation
        before = dict(zip(self.tensors, self.versions))
        tensors = (self.tensors if now is None else now).items()
        return [key for key, tensor in tensors if self._is_changed(key, tensor, before.get(key))]

    def _is_changed(self, key: _Key, tensor: torch.Tensor, version: int | None) -> bool:
        if tensor is not self.tensors.get(key) or versions_of([tensor]) != [version]:
            return True
        is_compared = self.compares and key in self.copies and tensor.layout is torch.strided
        return is_compared and not torch.equal(tensor, self.copies[key])

    def restore(self) -> None:
        """Copy the old numbers into the tensors that were changed, of which there are copies."""
        with torch.no_grad():
            for key in self.changed():
                self.tensors[key].copy_(self.copies[key])


def snapshot_of_buffers(buffers: Mapping[_Key, torch.Tensor]) -> Snapshot[_Key]:
    """Buffers, with copies of those that may be the statistics of a norm."""
    copied = [key for key, each in buffers.items() if each.dim() <= 1 and each.is_floating_point()]
    return Snapshot(buffers, copied, compares=True)


def versions_of(tensors: Collection[torch.Tensor]) -> list[int]:
    """How often each tensor has been changed in place. Torch does not count that of those made in inference mode."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # to ask each tensor first takes longer
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors. Those that share memory get copies that share memory.

    >>> x = torch.zeros(3)
    >>> one, other = copies_of([x, x[1:]])
    >>> other[0] = 5
    >>> one
    tensor([0., 5., 0.])
    """
    memories = [memory_of(tensor) for tensor in tensors]
    users = Counter(memories)
    storages: dict[int, torch.UntypedStorage] = {}
    return [
        tensor.detach().clone()
        if memory is None or users[memory] == 1
        else _on(storages.setdefault(memory, _cloned(storages, memory, tensor)), tensor)
        for tensor, memory in zip(tensors, memories)
    ]


def _cloned(storages: dict[int, torch.UntypedStorage], memory: int, tensor: torch.Tensor) -> torch.UntypedStorage:
    return storages[memory] if memory in storages else tensor.untyped_storage().clone()


def _on(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
