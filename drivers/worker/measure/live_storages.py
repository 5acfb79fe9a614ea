"""Counts the bytes of the storages that are alive, after each operation of torch.

Inside, every operation's results are looked at: a storage that is new counts from then on, until nothing refers to it any
more. So whatever keeps a tensor is seen: autograd, a context of a custom function, a closure, a list. What a kernel takes
for itself while it runs is not seen.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from pippy.ir.base.trees import plain_parts
from pippy.ir.base.without_dynamo import DispatchMode

_aten = torch.ops.aten
# Losses whose number keeps the storage in which the loss of each element was computed.
_WITH_ALL_ELEMENTS = {
    _aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.binary_cross_entropy.default, _aten.soft_margin_loss.default
}  # fmt: skip
# Operations of which some results are empty if they are fake, and not if they are real: memory of the kernel's own.
_WITH_MEMORY_OF_THE_KERNEL = {_aten.mkldnn_rnn_layer.default, _aten._cudnn_rnn.default, _aten.cudnn_batch_norm.default}


class LiveStorages(DispatchMode):
    """Inside, ``bytes`` are those of the storages that are alive, of those that were added or made here; ``most`` the most.

    Each storage takes a multiple of ``unit`` bytes.

    >>> x = torch.zeros(8)
    >>> with LiveStorages() as live:
    ...     live.add([x])
    ...     y = (x + 1).exp()
    ...     found = live.bytes, live.most
    ...     del y
    >>> found, live.bytes
    ((64, 96), 32)
    """

    def __init__(self, unit: int = 1) -> None:
        super().__init__()
        self.unit = unit
        self.bytes = self.most = 0
        self.looks = True
        self.looks_at_arguments = False  # what operations are given, too: tensors that came in otherwise
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # in the order in which they came: an address may be used again
        self.seen = 0  # how many storages have come

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.looks and self.looks_at_arguments:
            self.add(each for each in tree_leaves(args) if isinstance(each, torch.Tensor))
        result = func(*args, **(kwargs or {}))
        found = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if self.looks and any(isinstance(each, FakeTensor) for each in found):
            if func in _WITH_MEMORY_OF_THE_KERNEL:
                for tensor, size in zip(found, _sizes_of_results(func, args)):
                    self._count(tensor.untyped_storage(), size)
            elif func in _WITH_ALL_ELEMENTS:
                self._count(result.untyped_storage(), args[0].nbytes)
        if self.looks:
            self.add(found)
        return result

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors, too."""
        for tensor in tensors:
            for part in (tensor,) if tensor.layout is torch.strided else plain_parts(tensor):
                storage = part.untyped_storage()
                self._count(storage, storage.nbytes())

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Inside, nothing is looked at."""
        before, self.looks = self.looks, False
        try:
            yield
        finally:
            self.looks = before

    def newest_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Which storage of these tensors came last, of the ``seen`` ones; one that does not count is newer."""
        keys = (part.untyped_storage()._cdata for each in tensors for part in plain_parts(each))
        return max((self._numbers.get(key, self.seen + 1) for key in keys), default=0)

    def storages_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[tuple[int, int, int]]:
        """The storages of these tensors: the address of each, its number in the order in which they came, and its bytes."""
        keys = {part.untyped_storage()._cdata for each in tensors for part in plain_parts(each)}
        return frozenset((key, self._numbers[key], self._sizes[key]) for key in keys if key in self._numbers)

    def is_alive(self, storage: tuple[int, int, int]) -> bool:
        """Whether a storage is still there; at its address there may be another one."""
        address, number, _ = storage
        return self._numbers.get(address) == number

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """The bytes of the storages of these tensors, which count already, each once."""
        parts = (part for tensor in tensors for part in plain_parts(tensor))
        return sum(self._sizes[key] for key in {part.untyped_storage()._cdata for part in parts})

    def restart(self) -> int:
        """Begin to look for the most anew; returns the bytes that are alive now."""
        self.most = self.bytes
        return self.bytes

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        key, size = storage._cdata, -(-size // self.unit) * self.unit
        if key in self._alive:
            return

        def forget(_: Any) -> None:
            self.bytes -= size
            del self._alive[key], self._sizes[key], self._numbers[key]

        self.seen += 1
        self._alive[key], self._sizes[key], self._numbers[key] = weakref.ref(storage, forget), size, self.seen
        self.bytes += size
        self.most = max(self.most, self.bytes)


_found_sizes: dict[str, list[int]] = {}


def _sizes_of_results(func: Callable[..., Any], args: Any) -> list[int]:
    """The bytes of an operation's results: it is run on zeros, once for arguments of the same shapes."""
    described = tree_map(
        lambda each: (each.shape, each.dtype, each.device) if isinstance(each, torch.Tensor) else each, args
    )
    key = f"{func}{described}{torch.is_grad_enabled()}"  # without gradients some kernels need no such memory
    if key not in _found_sizes:
        with unset_fake_temporarily():
            results = func(*tree_map_only(torch.Tensor, _zeros, args))
        _found_sizes[key] = [0 if each is None else each.untyped_storage().nbytes() for each in results]
    return _found_sizes[key]


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
