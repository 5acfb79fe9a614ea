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
    """Stands for a tensor of the model that this worker does not make."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "ElsewhereTensor":
        """What stands for a tensor of the model."""
        return cls(tuple(tensor.shape), tensor.dtype, isinstance(tensor, nn.Parameter))

    def made(self) -> torch.Tensor:
        """The tensor without numbers that takes its place."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return nn.Parameter(tensor, requires_grad=False) if self.is_parameter else tensor


def unreadable(name: str) -> torch.Tensor:
    """What takes the place of a tensor that this worker does not have, in code that holds it and should not read it.

    >>> unreadable("a.weight").sum()
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: code on this worker reads 'a.weight', which is not here: ...
    """
    tensor = torch.empty(0).as_subclass(UnreadableTensor)
    tensor.__dict__["known_as"] = name
    return tensor


class UnreadableTensor(torch.Tensor):
    """See `unreadable`."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next(each.__dict__["known_as"] for each in tensors((args, kwargs)) if type(each) is cls)
        raise DriverError(
            f"code on this worker reads {name!r}, which is not here: pipeline() has not seen that the code reaches it. Name "
            "the attribute in the code, as in model.layer.weight, or let a module register what it reads; then call pipeline()"
        )


@dataclass(frozen=True)
class Initialize:
    """Initialize the tensors with these names, the user's, at these locations: one location for each copy on the worker.

    ``model`` has the model, in which a name stands for each tensor, and the function that initializes its modules. The answer
    lists the names of the tensors that nothing has written.
    """

    model: Pickled
    tensors: Mapping[str, Sequence[TensorLocation]]
    seed: int
