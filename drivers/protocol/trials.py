"""A trial: a step that is compared with another one. It leaves nothing on the worker but the tensors to compare."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pippy.drivers.compare.trial_notes import TrialNotes
from pippy.drivers.protocol.steps import Step


class Purpose(Enum):
    """What is done with the gradients and buffers of a trial.

    >>> Purpose.REFERENCE.value
    'the trials after it are compared with it'
    """

    REFERENCE = "the trials after it are compared with it"
    NOISE = "what differs is by how much rounding moves it"
    COMPARED = "what differs by more than that is given back"
    ALONE = "nothing is compared"


@dataclass(frozen=True)
class RunTrial:
    """Run ``step`` as a trial: gradients, buffers, random numbers and attributes of modules are afterwards as before it.

    Random numbers and batch norms are the same for every row: see `pippy.drivers.compare.alike`. With ``watch``, the worker
    notes what the model asks of numbers on the way to a mean. With ``follow_buffers``, buffers that differ change from now on
    once in a step, and not once for each micro-batch.
    """

    step: Step
    purpose: Purpose
    watch: bool = False
    follow_buffers: bool = False


@dataclass(frozen=True)
class ForgetTrials:
    """Drop the tensors that trials are compared with."""


@dataclass(frozen=True)
class TrialDifference:
    """A tensor of a stage that differs between two trials by ``off``. Its largest element is ``size``.

    ``kind`` is "gradient" or "buffer", ``name`` its name in the stage ``call``.
    """

    call: str
    name: str
    kind: str
    off: float
    size: float

    @property
    def share(self) -> float:
        """The difference as a part of the tensor's size."""
        return self.off / self.size if self.size else float("inf")


@dataclass(frozen=True)
class TrialResult:
    """What a worker answers: returned values by name, the differences, and what the model asked of numbers.

    ``is_finite`` says whether all tensors that trials are compared with are finite.
    """

    values: Mapping[str, Any]
    differences: tuple[TrialDifference, ...] = ()
    asked: TrialNotes = field(default_factory=TrialNotes)
    is_finite: bool = True
