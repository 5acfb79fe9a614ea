"""How many bytes autograd saves in a forward, for the backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class SavedBytes:
    """The bytes that autograd saves for backward: each storage counts once, and those of the model's tensors do not count.

    >>> saved, x = SavedBytes([]), torch.ones(8, requires_grad=True)
    >>> with saved.counting():
    ...     _ = x.exp()
    >>> saved.bytes
    32
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self.own = {_storage(tensor)._cdata for tensor in own}
        self.seen: dict[int, StorageWeakRef] = {}
        self.bytes = 0

    @contextmanager
    def counting(self) -> Iterator["SavedBytes"]:
        """Inside, ``bytes`` counts from zero."""
        self.bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield self

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage._cdata not in self.own and storage._cdata not in self.seen:
            self.seen[storage._cdata] = StorageWeakRef(storage)  # while this lives, no other storage has the key
            self.bytes += storage.nbytes()
        return tensor


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor if tensor.layout == torch.strided else tensor._values()).untyped_storage()
