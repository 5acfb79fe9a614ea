"""Where a worker has tensors of the model, and making them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pippy.drivers.wire.pickling import Pickled


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


@dataclass(frozen=True)
class Initialize:
    """Initialize the tensors with these names, the user's, at these locations: one location for each copy on the worker.

    ``model`` has the model, in which a name stands for each tensor, and the function that initializes its modules. The answer
    lists the names of the tensors that nothing has written.
    """

    model: Pickled
    tensors: Mapping[str, Sequence[TensorLocation]]
    seed: int
