"""Where a worker has tensors of the model, and making them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import DriverError
from pippy.drivers.wire.pickling import Pickled
from pippy.ir.base.trees import tensors


@dataclass(frozen=True)
class TensorLocation:
    """Where a worker finds a parameter or buffer: the name of the stage (or `_loss`), and the tensor's name in that stage."""

    call: str
    name: str


@dataclass(frozen=True)
class ElsewhereTensor:
    """Stands for a tensor that this worker does not have. ``name`` is what errors call it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> "ElsewhereTensor":
        """What stands for a tensor."""
        return cls(name, tuple(tensor.shape), tensor.dtype, isinstance(tensor, nn.Parameter))

    def made(self) -> torch.Tensor:
        """A tensor of the meta device that takes its place."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return nn.Parameter(tensor, requires_grad=False) if self.is_parameter else tensor

    def unreadable(self) -> torch.Tensor:
        """A tensor that takes its place, and raises where anything but its shape is read."""
        tensor = self.made().as_subclass(_Unreadable)
        tensor.__dict__.update(known_as=self.name, _is_param=self.is_parameter)
        return tensor


class _Unreadable(torch.Tensor):
    """
    >>> weight = ElsewhereTensor("a.weight", (2, 3), torch.float32, True).unreadable()
    >>> weight.shape, isinstance(weight, nn.Parameter)
    (torch.Size([2, 3]), True)
    >>> weight.sum()
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: code on this worker reads 'a.weight', which is on another worker ...
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READABLE:
            return super().__torch_function__(function, types, args, kwargs or {})
        name = next(each.__dict__["known_as"] for each in tensors((args, kwargs)) if type(each) is cls)
        raise DriverError(
            f"code on this worker reads {name!r}, which is on another worker, and pipeline() has not seen that the code "
            "reaches it: by getattr() with a name that is made up while it runs, or by a hook that came later. Name the "
            "attribute in the code, as in model.layer.weight, or have a module register it, before pipeline() is called"
        )


_READABLE = (
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Initialize:
    """Initialize the tensors with these names, the user's, at these locations: one location for each copy on the worker.

    ``model`` has the model, in which a name stands for each tensor, and the function that initializes its modules. The answer
    lists the names of the tensors that nothing has written.
    """

    model: Pickled
    tensors: Mapping[str, Sequence[TensorLocation]]
    seed: int
