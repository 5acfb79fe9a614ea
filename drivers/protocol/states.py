"""What a worker holds for a driver, and how the controller takes it and puts it in place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pippy.drivers.protocol.parameters import TensorLocation


@dataclass(frozen=True)
class WorkerState:
    """Parameters and buffers, the states of optimizers by their numbers, and random numbers: all of them, or some.

    It goes to the files of a checkpoint, to a neighbour, or to the controller, and comes from there.
    """

    tensors: Mapping[TensorLocation, torch.Tensor] = field(default_factory=dict)
    optimizers: Mapping[int, Mapping[TensorLocation, Mapping[str, Any]]] = field(default_factory=dict)
    random: Any = None


@dataclass(frozen=True)
class GiveState:
    """Give the `WorkerState` at these locations: that of tensors, and that of optimizers for parameters."""

    tensors: tuple[TensorLocation, ...] = ()
    optimizers: Mapping[int, tuple[TensorLocation, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class RestoreState:
    """Put a state in place. An optimizer that is in it has no other state afterwards."""

    state: WorkerState
