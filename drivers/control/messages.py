"""Everything that the controller and the workers say to one another.

The controller numbers its commands, for all workers of a cluster alike; the numbers name the steps in which values
travel, and what is to be given up after a failure. A worker obeys its commands in order and answers each of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pippy.drivers.batches.division import Division
from pippy.drivers.lowering.flow import Work
from pippy.drivers.schedules.programs.edges import Pass
from pippy.drivers.schedules.programs.instructions import Instruction
from pippy.drivers.transport.packing import Packed


@dataclass(frozen=True)
class Command:
    """What a worker is to do for one driver. Commands up to ``settled`` have succeeded on all workers.

    ``zero_grad`` says to drop the driver's gradients first, ``dropped`` which drivers are gone.
    """

    number: int
    settled: int
    driver: int
    body: Any
    zero_grad: bool = False
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a parameter or buffer lives: the call of a stage (or of the loss), and its name in there."""

    call: str
    name: str


@dataclass(frozen=True)
class Copies:
    """A replicated parameter: its user's name, and the worker and place of every copy, in the order of the stages."""

    name: str
    copies: tuple[tuple[int, Place], ...]


@dataclass(frozen=True)
class Settings:
    """What is set in the controller's process for all of torch, and bears on the numbers."""

    dtype: torch.dtype
    precision: str
    deterministic: bool

    @staticmethod
    def current() -> "Settings":
        """Those of this process."""
        precision = torch.get_float32_matmul_precision()
        return Settings(torch.get_default_dtype(), precision, torch.are_deterministic_algorithms_enabled())

    def apply(self) -> None:
        """Make them those of this process."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        torch.use_deterministic_algorithms(self.deterministic)


@dataclass(frozen=True)
class Load:
    """The stages that a worker will run.

    ``modules`` holds them by the names that the graph calls them by, ``constant`` the names of their tensors that other
    stages hold too, and ``replicated`` every replicated parameter of the Pipe. ``compile`` has the options of torch.compile,
    where the stages are to be compiled.
    """

    modules: Packed
    constant: Mapping[str, Sequence[str]]
    replicated: tuple[Copies, ...]
    seed: int
    settings: Settings
    compile: Packed | None = None


@dataclass(frozen=True)
class Call:
    """How the graph calls a stage: with its inputs in order, or as ``template`` arranges them, by number."""

    name: str
    template: Any = None


@dataclass(frozen=True)
class Slot:
    """The place of an input in a template."""

    index: int


@dataclass(frozen=True)
class Overtaking:
    """A worker's computations may overtake one another: with at most ``limit`` stage-micro-batches alive, or for None as many
    as the program has at its peak. ``depth`` is how many keep the workers busy that a micro-batch has yet to pass."""

    limit: int | None
    depth: int


@dataclass(frozen=True)
class AddProgram:
    """A worker's part of a program, under a number: sent once, run in many steps.

    ``slots`` numbers the values that travel, and ``ranks`` are the workers of the cluster that the program's workers
    are. ``returns`` are the values that go back to the controller. Without ``overtaking`` the order is kept.
    """

    program: int
    order: tuple[Instruction, ...]
    work: Mapping[Pass, tuple[Work, ...]]
    calls: Mapping[str, Call]
    slots: Mapping[str, int]
    ranks: tuple[int, ...]
    returns: tuple[str, ...]
    single_loss: bool
    overtaking: Overtaking | None = None


@dataclass(frozen=True)
class Step:
    """Run a program once. ``weights`` are what the losses of the micro-batches count, ``flags`` the training flags of
    every module where they changed, and ``reduce`` says to add up the gradients of replicated parameters on the way,
    ``record`` to note the times of all instructions, ``weigh`` to weigh what each stage keeps for its backward."""

    program: int
    trains: bool
    inputs: Division
    weights: tuple[float, ...]
    flags: Mapping[str, tuple[bool, ...]] | None = None
    reduce: bool = False
    record: bool = False
    weigh: bool = False


@dataclass(frozen=True)
class WorkerRecord:
    """What a worker noted of a recorded step, in seconds of its monotonic clock. ``clock`` tells clocks apart: by host.

    The step was there at ``began`` and done at ``ended``. The first instruction began at ``started``, every other when the
    one before it ended; ``ends`` go by the number of the instruction. ``sizes`` are the bytes that each send handed over.
    Adding up the gradients of replicated parameters began at ``adding``. ``memory`` is what was used at most, in bytes,
    and ``memory_of`` says of what. ``cpu`` is how long the worker's thread had a core; None where it waits for a device.
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

    def spans(self) -> list[tuple[float, float]]:
        """When each instruction began and ended, by its number."""
        found = [(0.0, 0.0)] * len(self.ends)
        start = self.started
        for at in sorted(range(len(self.ends)), key=self.ends.__getitem__):
            found[at] = start, self.ends[at]
            start = self.ends[at]
        return found

    def shifted(self, by: float) -> "WorkerRecord":
        """The same, by a clock that is so much ahead."""
        return replace(
            self,
            began=self.began + by,
            started=self.started + by,
            ends=[end + by for end in self.ends],
            adding=None if self.adding is None else self.adding + by,
            ended=self.ended + by,
        )


@dataclass(frozen=True)
class StepResult:
    """What a worker gives back after a step: the returned values by name, and the most stage-micro-batches held.

    ``kept`` has the bytes that a micro-batch of each stage keeps, in a step that was to weigh them.
    """

    values: Mapping[str, Any]
    peak_live: int
    record: WorkerRecord | None = None
    kept: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Unload:
    """Drop all that belongs to the driver."""


@dataclass(frozen=True)
class Fetch:
    """Give the tensors at some places, or their gradients."""

    places: tuple[Place, ...]
    gradients: bool = False


@dataclass(frozen=True)
class Store:
    """Copy tensors to places."""

    tensors: Mapping[Place, torch.Tensor]


@dataclass(frozen=True)
class ReduceGradients:
    """Add up the gradients of replicated parameters, where that was not done yet."""


@dataclass(frozen=True)
class Norms:
    """Give the norm of each gradient at some places."""

    places: tuple[Place, ...]
    norm_type: float
    reduce: bool


@dataclass(frozen=True)
class Scale:
    """Multiply all gradients by a number."""

    factor: float


@dataclass(frozen=True)
class MakeOptimizer:
    """Make an optimizer under a number. A group is the places of its parameters and its options."""

    optimizer: int
    factory: Packed
    groups: tuple[tuple[tuple[Place, ...], Mapping[str, Any]], ...]


@dataclass(frozen=True)
class OptimizerStep:
    """Let an optimizer step, with the options of each group where they changed."""

    optimizer: int
    groups: tuple[Mapping[str, Any], ...] | None
    reduce: bool


@dataclass(frozen=True)
class OptimizerState:
    """Give the state that an optimizer has for the parameters at some places."""

    optimizer: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class LoadOptimizerState:
    """Replace the state of an optimizer."""

    optimizer: int
    state: Mapping[Place, Mapping[str, Any]]


@dataclass(frozen=True)
class Abandon:
    """Urgent: give up the commands from ``first`` to ``last``, as far as they are not done."""

    first: int
    last: int


@dataclass(frozen=True)
class Dump:
    """Urgent: say what the worker does, and what it waits for."""


@dataclass(frozen=True)
class Failure:
    """What went wrong on a worker. ``peer`` is the other worker, where that one seems to be dead."""

    message: str
    traceback: str
    where: str = ""
    instruction: str = ""
    stage: int | None = None
    microbatch: int | None = None
    peer: int | None = None
    abandoned: bool = False


@dataclass(frozen=True)
class Answer:
    """The answer to a command: a value, or what went wrong."""

    value: Any = None
    failure: Failure | None = None
