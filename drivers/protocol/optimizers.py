"""Optimizers on the workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.protocol.parameters import TensorLocation
from pippy.drivers.wire.pickling import Pickled


@dataclass(frozen=True)
class MakeOptimizer:
    """Make an optimizer, and keep it under a number. A group has the locations of its parameters, and its options.

    With ``master_dtype`` the optimizer updates copies, of this dtype, of the parameters that have another dtype. If there are
    replicas of the pipeline, ``names`` are those of all its parameters. If its state is divided, a worker has only that of the
    parameters whose gradients it adds up, and ``passes_on`` says how it sends these to other workers, and takes theirs.
    ``attributes`` are those that the script has set on parameters, by location: an optimizer may read them.
    """

    optimizer: int
    factory: Pickled
    groups: tuple[tuple[tuple[TensorLocation, ...], Mapping[str, Any]], ...]
    master_dtype: torch.dtype | None = None
    names: tuple[str, ...] = ()
    passes_on: tuple[Instruction, ...] | None = None
    attributes: Mapping[TensorLocation, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerStep:
    """Run an optimizer's step. ``groups`` has the options of each group, or None if they did not change; ``attributes`` in the
    same way has those of parameters."""

    optimizer: int
    groups: tuple[Mapping[str, Any], ...] | None
    reduce: bool
    attributes: Mapping[TensorLocation, Mapping[str, Any]] | None = None
