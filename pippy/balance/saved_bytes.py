"""How many bytes autograd saves in a forward, for the backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pippy.ir.sparse_tensors import plain_parts


class SavedBytes:
    """The bytes that autograd saves for backward: each storage counts once, and those of the model's tensors do not count.

    >>> saved, x = SavedBytes([]), torch.ones(8, requires_grad=True)
    >>> with saved.counting():
    ...     _ = x.exp()
    >>> saved.bytes
    32
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self.own = {part.untyped_storage()._cdata for tensor in own for part in plain_parts(tensor)}
        self.seen: dict[int, StorageWeakRef] = {}
        self.bytes = 0

    @contextmanager
    def counting(self) -> Iterator["SavedBytes"]:
        """Inside, ``bytes`` counts from zero."""
        self.bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield self

    def added(self, tensor: torch.Tensor) -> int:
        """The bytes that are saved with a tensor, and were not before."""
        before = self.bytes
        self._save(tensor)
        return self.bytes - before

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        for storage in [part.untyped_storage() for part in plain_parts(tensor)]:
            if storage._cdata not in self.own and storage._cdata not in self.seen:
                self.seen[storage._cdata] = StorageWeakRef(storage)  # while this lives, no other storage has the key
                self.bytes += storage.nbytes()
        return tensor
