"""The storages of tensors, and those that autograd saves in a forward for the backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pippy.ir.base.sparse_tensors import plain_parts
from pippy.ir.base.trees import tensors


class Storages:
    """Gives each storage a key. Storages of the model's tensors are left out.

    >>> storages, x = Storages([]), torch.ones(8, requires_grad=True)
    >>> with storages.saved() as saved:
    ...     y = x.exp()
    >>> saved == storages.of(y), list(saved.values())
    (True, [32])
    """

    def __init__(self, model_tensors: Iterable[torch.Tensor]) -> None:
        self.of_model = {part.untyped_storage()._cdata for tensor in model_tensors for part in plain_parts(tensor)}
        self.seen: dict[int, StorageWeakRef] = {}
        self.stands_for: dict[int, tuple[int, int]] = {}  # of copies: the storage that was copied, and its bytes

    def of(self, values: Any) -> dict[int, int]:
        """The storages of the tensors in ``values``, and their bytes."""
        sizes = {}
        for storage in [part.untyped_storage() for tensor in tensors(values) for part in plain_parts(tensor)]:
            key = storage._cdata
            if key not in self.of_model:
                self.seen.setdefault(key, StorageWeakRef(storage))  # while this lives, no other storage has the key
                name, size = self.stands_for.get(key, (key, storage.nbytes()))
                sizes[name] = size
        return sizes

    def copied(self, copy: torch.Tensor, original: torch.Tensor) -> None:
        """Give the storage of a copy the key of the original."""
        both = self.of(copy), self.of(original)
        self.stands_for.update(zip(both[0], both[1].items()))

    @contextmanager
    def saved(self) -> Iterator[dict[int, int]]:
        """Inside, what autograd saves is added to the dict that this gives."""
        sizes: dict[int, int] = {}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            sizes.update(self.of(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            yield sizes
