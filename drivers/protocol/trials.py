"""A trial: a step that leaves nothing on the worker. Its numbers are compared with those of another way to compute them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pippy.drivers.protocol.parameters import TensorLocation
from pippy.drivers.protocol.steps import Step, StepResult


@dataclass(frozen=True)
class RunTrial:
    """Run ``step`` as a trial: gradients, buffers, random numbers and attributes of modules are afterwards as before it.

    With ``few`` rows, no graphs of stages are recorded, and hooks of parameters are not called. ``written`` are the parameters
    that forward changes, and ``follow`` the buffers that change once in a step from now on. With ``wide``, numbers of 16 bits
    are of 32 bits.
    """

    step: Step
    few: bool = False
    wide: bool = False
    written: tuple[TensorLocation, ...] = ()
    follow: tuple[TensorLocation, ...] = ()


@dataclass(frozen=True)
class TrialResult:
    """What a worker answers: the result of the step, and digests of gradients and of the buffers that have changed.

    ``disagreeing`` has the buffers of which micro-batches make different things, though they change once in a step.
    """

    result: StepResult
    gradients: Mapping[TensorLocation, torch.Tensor]
    buffers: Mapping[TensorLocation, torch.Tensor]
    disagreeing: tuple[TensorLocation, ...] = ()
