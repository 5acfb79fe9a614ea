"""Code and modules by value: what a worker is given works there without being importable there.

Classes and functions of a script, a notebook or a REPL travel as their code (cloudpickle); those of installed or importable
modules by name. Tensors are taken out and travel as tensors, each storage once, so that tied weights arrive tied.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import nn

from pippy.drivers.errors import PackingError


@dataclass(frozen=True)
class Packed:
    """An object as bytes, and the storages of its tensors as flat tensors of bytes."""

    code: bytes
    storages: Sequence[torch.Tensor]


def pack(value: Any) -> Packed:
    """An object to be sent to a worker.

    >>> linear = nn.Linear(2, 2)
    >>> twice = unpack(pack([linear, linear]))
    >>> twice[0] is twice[1], torch.equal(twice[0].weight, linear.weight)
    (True, True)
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except Exception as error:  # pickle has no one error for what it cannot write
        raise PackingError(
            f"a {type(value).__name__} cannot be sent to the workers: {type(error).__name__}: {error}. Something in it "
            "belongs to this process (a file, a lock, a generator, a cluster); keep that out of the model and its arguments"
        ) from error
    return Packed(stream.getvalue(), pickler.storages)


def unpack(packed: Packed) -> Any:
    """The object that was packed."""
    return _Unpickler(io.BytesIO(packed.code), packed.storages).load()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}
        self.tensors: dict[int, tuple[int, torch.Tensor]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or type(obj) not in (torch.Tensor, nn.Parameter):
            return None
        if obj.layout != torch.strided or obj.is_quantized:
            return None
        if id(obj) in self.tensors:
            return self.tensors[id(obj)][0]
        self.tensors[id(obj)] = len(self.tensors), obj
        return len(self.tensors) - 1, self._description(obj)

    def _description(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self.numbers[storage._cdata] = len(self.storages)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.storages.append(whole.cpu())
        number = self.numbers[storage._cdata]
        kind = type(tensor).__name__
        view = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        return number, kind, view, (tensor.requires_grad, tensor.is_conj(), tensor.is_neg())


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, storages: Sequence[torch.Tensor]) -> None:
        super().__init__(stream)
        self.storages = storages
        self.tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return self.tensors[pid]
        number, description = pid
        self.tensors[number] = made = self._tensor(*description)
        return made

    def _tensor(self, number: int, kind: str, view: tuple[Any, ...], flags: tuple[bool, ...]) -> torch.Tensor:
        dtype, shape, stride, offset = view
        requires_grad, conjugate, negative = flags
        empty = torch.empty(0, dtype=dtype)
        tensor = empty.set_(self.storages[number].untyped_storage(), offset, shape, stride)
        tensor = torch._conj(tensor) if conjugate else tensor
        tensor = torch._neg_view(tensor) if negative else tensor
        if kind == "Parameter":
            return nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_(requires_grad)
