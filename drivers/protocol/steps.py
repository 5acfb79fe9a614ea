"""One run of a program: in earnest, as a trial, or under a profiler; and what a worker gives back of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pippy.drivers.batch.division import Division
from pippy.drivers.compare.trial_notes import TrialNotes
from pippy.drivers.protocol.state import TensorLocation, WorkerHooks
from pippy.drivers.wire.pickling import Pickled
from pippy.ir.run.random_state import RandomStep


@dataclass(frozen=True, eq=False)
class StageSettings:
    """Attributes of the modules of a stage that the script has set: by the number of a module, and the name."""

    values: Pickled


@dataclass(frozen=True)
class StageFlags:
    """The training flag of each module of a stage, whether each of its parameters requires a gradient, and attributes."""

    training: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    settings: StageSettings | None = None


@dataclass(frozen=True)
class GraphStep:
    """The next micro-batches of a step, which go by another graph of the model: by its ``program``, and with what `Step` has.

    ``returns`` are the values to return, as in `StepReturning`; None for those of the program.
    """

    program: int
    inputs: Division
    weights: tuple[float, ...]
    returns: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Step:
    """Run a program once.

    ``weights`` has the weight of each micro-batch's loss. ``flags`` has the flags of each stage, or None if they did not
    change; ``hooks`` in the same way has the hooks of parameters. With ``reduce``, the gradients of replicated parameters are
    added up. With ``record``, the times of all instructions are recorded; with ``count_memory``, also the bytes
    that are held. With ``scale``, the loss is multiplied by it for the backward, and the gradients are divided by it at the
    end. With ``probe_outputs``, the worker finds the returned values that have as many rows as a micro-batch by chance.
    ``random`` says of which step the random numbers are; None if the worker goes on with its own. With ``weighed``, the
    worker computes ``weights``. With ``alike``, random operations and batch norms give the same for every row. With ``see``,
    the worker notes what each call takes and gives. With ``watch``, it notes what the model asks of numbers on the way to a
    mean.

    ``then`` are the micro-batches behind those of ``inputs`` that go by other programs. ``graph_flags`` are the flags of the
    stages of other graphs, by their numbers. A step that is ``unsure`` may fail a guard: then all that forward has changed is
    put back.
    """

    program: int
    trains: bool
    inputs: Division
    weights: tuple[float, ...]
    flags: Mapping[str, StageFlags] | None = None
    hooks: WorkerHooks | None = None
    reduce: bool = False
    record: bool = False
    scale: float | None = None
    probe_outputs: bool = False
    count_memory: bool = False
    random: RandomStep | None = None
    weighed: bool = False
    alike: bool = False
    see: bool = False
    watch: bool = False
    then: tuple[GraphStep, ...] = ()
    graph_flags: Mapping[int, Mapping[str, StageFlags]] = field(default_factory=dict)
    unsure: bool = False

    @property
    def parts(self) -> "list[Step | GraphStep]":
        """The micro-batches that go by one program, and then those that go by others."""
        return [self, *self.then]

    @property
    def chunks(self) -> int:
        """How many micro-batches a worker runs."""
        return sum(len(each.inputs.held) for each in self.parts)

    def rows_shown(self, microbatch: int) -> str:
        """The rows of a micro-batch as the user knows them, for errors."""
        before, rows = 0, sum(part.inputs.rows or 0 for part in self.parts) if self.then else None
        for part in self.parts:
            if microbatch < part.inputs.chunks:
                return part.inputs.rows_shown(microbatch, before, rows)
            microbatch, before = microbatch - part.inputs.chunks, before + (part.inputs.rows or 0)
        return ""


@dataclass(frozen=True)
class StepReturning(Step):
    """A step that returns other values than its program says: those in ``returns``.

    Each has None for all of it, or a seed: only the loss, which is at that place in it, is returned.
    """

    returns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerRecord:
    """One worker's times in a recorded step, in seconds of its monotonic clock. ``clock`` names the clock: one for each host.

    The worker began the step at ``began``, and ended it at ``ended``. The first instruction began at ``started``, and each of
    the others when the one before it ended. By the instruction's number, ``ends`` has the end of each instruction, and
    ``sizes`` the bytes of each send. At ``adding`` the worker began to add up the gradients of replicated parameters.
    ``memory`` is the peak in bytes, and ``memory_of`` says what was measured. ``cpu`` is the processor time of the worker's
    thread; None where the thread waits for a device. ``held`` has the most bytes that were held during each instruction, and
    the bytes after it; the last item is for the end of the step. It is None if bytes were not recorded.
    """

    clock: str
    began: float
    started: float
    ends: Sequence[float]
    adding: float | None
    ended: float
    sizes: Mapping[int, int]
    memory: int
    memory_of: str
    cpu: float | None = None
    held: tuple[Sequence[int], Sequence[int]] | None = None

    def spans(self) -> list[tuple[float, float]]:
        """When each instruction began and ended, by its number."""
        spans = [(0.0, 0.0)] * len(self.ends)
        start = self.started
        for at in sorted(range(len(self.ends)), key=self.ends.__getitem__):
            spans[at] = start, self.ends[at]
            start = self.ends[at]
        return spans

    def shifted(self, by: float) -> "WorkerRecord":
        """The same times on a clock that is ``by`` seconds ahead."""
        return replace(
            self,
            began=self.began + by,
            started=self.started + by,
            ends=[end + by for end in self.ends],
            adding=None if self.adding is None else self.adding + by,
            ended=self.ended + by,
        )


@dataclass(frozen=True)
class SeenCall:
    """What one call of a stage, or of `_loss`, took and gave: forward ("F") values, backward ("B") gradients.

    ``gives`` is None for a loss that is computed once, over all micro-batches.
    """

    phase: str
    call: str
    microbatch: int
    takes: Any
    gives: Any


@dataclass(frozen=True)
class StepResult:
    """What a worker gives back after a step: the returned values by name.

    ``peak_live`` is the largest number of micro-batches that its stages held at a time. ``nonfinite`` has the parameters
    whose gradients are not finite, if the loss was scaled. ``by_chance`` has the values, with the numbers of the tensors in
    them, that have as many rows as a micro-batch by chance. ``weights`` are those of the losses, if the worker computes them.
    ``seen`` has what each call took and gave, if that is noted, and ``asked`` what the model asked of numbers. ``prepared``
    says that graphs of stages were recorded or compiled in the step. ``then`` are the results of its other parts.
    """

    values: Mapping[str, Any]
    peak_live: int
    record: WorkerRecord | None = None
    nonfinite: tuple[TensorLocation, ...] = ()
    by_chance: tuple[tuple[str, int], ...] = ()
    weights: tuple[float, ...] | None = None
    seen: tuple[SeenCall, ...] = ()
    asked: TrialNotes = field(default_factory=TrialNotes)
    prepared: bool = False
    then: tuple["StepResult", ...] = ()


# A trial: a step that leaves nothing on the worker. Its numbers are compared with those of another way to compute them.


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


# Profiles: torch.profiler runs in the workers, and the controller puts their traces into one file.


@dataclass(frozen=True)
class StartProfile:
    """Start torch.profiler, with these activities, by name, and these options. Without activities, with all that are there."""

    activities: tuple[str, ...] | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class AskTime:
    """Say which clock the worker has, one for each host, and its time in seconds."""


@dataclass(frozen=True)
class StopProfile:
    """Stop torch.profiler. The answer is the trace that it exports, compressed; None if no profiler runs."""
