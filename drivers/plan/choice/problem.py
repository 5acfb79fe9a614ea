"""The problem of a choice: which programs there are to choose from, what they cost, and which limits they have to keep.

A limit is a predicate of candidates. It says what a candidate holds that is too much, and how much there is room for. Users
write numbers of bytes with units, and are shown them in a form that they can write.

A candidate of the choice is a program for a number of micro-batches, what its step takes, and what its workers hold.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, isfinite
from typing import Any, ClassVar

from pippy.drivers.plan.cost.held_bytes import PipeBytes, lowered_program, peak_bytes
from pippy.drivers.plan.cost.simulate import Costs, simulate_with
from pippy.drivers.plan.language.errors import ArgumentError, beginning
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.make import make_schedule
from pippy.drivers.plan.passes.rewrites import Checkpoint, modes_of

TIE = 0.02

Modes = dict[int, str]  # which forwards each stage computes again


@dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch costs each stage, in seconds; and the bytes of each stage and value of it, if they are known."""

    costs: Costs = field(default_factory=Costs)
    sizes: PipeBytes | None = None


@dataclass(frozen=True)
class Candidate:
    """A program that could be chosen. Its time and its peaks are predicted when they are asked for.

    >>> from pippy.drivers.plan import make_schedule
    >>> candidate = Candidate(make_schedule("1f1b", workers=2, chunks=4), MicroBatch(Costs()))
    >>> candidate.seconds, candidate.peak_live, candidate.peak_bytes
    (15.0, (2, 1), None)
    """

    program: Program
    micro_batch: MicroBatch
    modes: Modes = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.program.schedule

    @property
    def chunks(self) -> int:
        """How many micro-batches."""
        return self.program.chunks

    @property
    def checkpoint(self) -> Modes:
        """The stages that compute forwards again, as `checkpoint=` takes them."""
        return {stage: mode for stage, mode in sorted(self.modes.items()) if mode != "never"}

    @cached_property
    def _lowered(self) -> Program:
        return lowered_program(self.program)

    @cached_property
    def _times(self) -> tuple[float, float]:
        simulation = simulate_with(self._lowered, self.micro_batch.costs)
        return float(simulation.makespan), float(sum(simulation.idle)) / self.program.workers

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        return self._times[0]

    @property
    def waits(self) -> float:
        """How many of these seconds a worker does not compute, in the mean of all workers."""
        return self._times[1]

    @property
    def computes(self) -> float:
        """How many of these seconds a worker computes, in the mean of all workers."""
        return self.seconds - self.waits

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """The most stage-micro-batches that each worker holds."""
        return self.program.peak_live

    @cached_property
    def peak_bytes(self) -> tuple[int, ...] | None:
        """The most bytes that each worker holds, if it is known what a stage holds."""
        sizes = self.micro_batch.sizes
        return None if sizes is None else peak_bytes(self._lowered, sizes)

    @property
    def memory(self) -> tuple[int, int]:
        """What the fullest worker holds, and what all workers hold. Candidates are compared by this."""
        peaks = self.peak_bytes or self.peak_live
        return max(peaks), sum(peaks)


def lightest_of_fastest(candidates: Sequence[Candidate]) -> Candidate:
    """The one to take: of those that take hardly longer than the fastest, the one that holds least."""
    fastest = min(each.seconds for each in candidates)
    return min((each for each in candidates if each.seconds <= fastest * (1 + TIE)), key=lambda each: each.memory)


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BY_NAME = {name.lower(): unit for name, unit in UNITS.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*", re.ASCII)
EXAMPLE = 'as in "12GiB", "500MB" or 12 * 2**30'


def byte_count(given: Any, name: str = "memory=") -> int:
    """The bytes that a size stands for: a number of them, or a text with a unit.

    >>> byte_count("1.5KiB"), byte_count("2 MB"), byte_count(7)
    (1536, 2000000, 7)
    """
    count = 0.0
    if isinstance(given, str) and (parts := _SIZE.fullmatch(given)) and parts[2].lower() in _BY_NAME:
        count = float(parts[1]) * _BY_NAME[parts[2].lower()]
    elif isinstance(given, int) and not isinstance(given, bool):
        count = given
    if not (isfinite(count) and count >= 1):
        unit = isinstance(given, str) and given.strip().replace(".", "", 1).isdigit()
        why = f"it has no unit; the units are {', '.join(UNITS)}" if unit else f"give bytes, {EXAMPLE}"
        raise ArgumentError(f"{name}{beginning(given)}: {why}")
    return int(count)


def limits_of(given: Any, workers: int, name: str = "memory=") -> tuple[int, ...]:
    """The limit of each worker: one for all, one for each, or a dict by worker.

    >>> limits_of(["1KB", 7], workers=2), limits_of({1: 7, 0: "1KB"}, workers=2)
    ((1000, 7), (1000, 7))
    """
    if isinstance(given, Mapping):
        if set(given) != set(range(workers)) or any(isinstance(each, bool) for each in given):
            raise ArgumentError(
                f"{name}{beginning(dict(given))}: give a size for each worker, 0 to {workers - 1}, or one for all"
            )
        return tuple(byte_count(given[worker], name) for worker in range(workers))
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        if len(given) != workers:
            raise ArgumentError(
                f"{name}{beginning(list(given))} has {len(given)} sizes for {workers} workers; give one, or one each"
            )
        return tuple(byte_count(each, name) for each in given)
    return (byte_count(given, name),) * workers


def byte_text(count: int) -> str:
    """A number of bytes as `byte_count` reads it, in three digits, rounded up: what is advised is enough.

    >>> byte_text(1537), byte_text(3 * 2**30), byte_text(1023), byte_text(2**20 - 1)
    ('1.51 KiB', '3 GiB', '1023 B', '1 MiB')
    """
    for name in ("TiB", "GiB", "MiB", "KiB"):
        unit = UNITS[name]
        if count > unit - unit // 1024:
            steps = 100 if count < 10 * unit else 10 if count < 100 * unit else 1
            return f"{ceil(count / unit * steps) / steps:g} {name}"
    return f"{count} B"


_ANY = 2**31  # stage-micro-batches: more than any program has
_NOT_COUNTED = "a limit of bytes needs the bytes of a micro-batch; give the problem sizes="


@dataclass(frozen=True)
class Limit(ABC):
    """The most that each worker may hold of something.

    ``counts_inputs`` says whether it counts the inputs that a forward leaves which is computed again.
    """

    most: tuple[int, ...]
    counts_inputs: ClassVar[bool]
    noun: ClassVar[str]  # what is limited

    @abstractmethod
    def held(self, candidate: Candidate) -> tuple[int, ...]:
        """The most that each worker holds of it."""

    @abstractmethod
    def text(self, held: int, most: int) -> str:
        """What a worker holds, and its limit, as reports show them."""

    @abstractmethod
    def room(self, worker: int, stages: Sequence[int], sizes: PipeBytes | None) -> int:
        """How many stage-micro-batches a worker with these stages has room for, whichever they are."""

    def keeps(self, worker: int, held: int) -> bool:
        """Whether a worker that holds so much keeps the limit."""
        return held <= self.most[worker]

    def refusal(self, candidate: Candidate) -> str:
        """Says why a candidate is refused. It is empty if the candidate keeps the limit.

        >>> from pippy.drivers.plan import make_schedule
        >>> from pippy.drivers.plan.choice.problem import MicroBatch
        >>> LiveLimit((1, 1)).refusal(Candidate(make_schedule("1f1b", workers=2, chunks=4), MicroBatch()))
        'it holds 2 stage-micro-batches on worker 0, and the limit is 1'
        """
        for worker, held in enumerate(self.held(candidate)):
            if not self.keeps(worker, held):
                return f"it holds {held:,} {self.noun} on worker {worker}, and the limit is {self.most[worker]:,}"
        return ""


class LiveLimit(Limit):
    """The most stage-micro-batches whose forward has run, or has run again, and whose backward has not."""

    noun = "stage-micro-batches"
    counts_inputs = False

    def held(self, candidate: Candidate) -> tuple[int, ...]:
        return candidate.peak_live

    def text(self, held: int, most: int) -> str:
        return f"{held} of {most} {self.noun}"

    def room(self, worker: int, stages: Sequence[int], sizes: PipeBytes | None) -> int:
        return self.most[worker]


class MemoryLimit(Limit):
    """The most bytes, of what is counted of a micro-batch."""

    noun = "bytes"
    counts_inputs = True

    def held(self, candidate: Candidate) -> tuple[int, ...]:
        if candidate.peak_bytes is None:
            raise ArgumentError(_NOT_COUNTED)
        return candidate.peak_bytes

    def text(self, held: int, most: int) -> str:
        return f"{byte_text(held)} of {byte_text(most)}"

    def room(self, worker: int, stages: Sequence[int], sizes: PipeBytes | None) -> int:
        if sizes is None:
            raise ArgumentError(_NOT_COUNTED)
        own = [sizes.stages[stage] for stage in stages]
        largest = max(stage.kept for stage in own)
        free = self.most[worker] - sum(stage.persistent + stage.gradients for stage in own)
        return free // largest if largest else _ANY


def live_counts(
    limits: Sequence[Limit],
    placement: Placement,
    chunks: int,
    sizes: PipeBytes | None = None,
    modes: Sequence[str] = (),
) -> list[int] | None:
    """How many stage-micro-batches each worker has room for, and at least its number of stages. None without a limit.

    If the ``modes`` of all stages of a worker compute forwards again, it may begin any number, unless a limit counts inputs.

    >>> from pippy.drivers.plan.cost.held_bytes import StageBytes
    >>> sizes = PipeBytes((StageBytes(kept=30), StageBytes(kept=40)))
    >>> live_counts([MemoryLimit((100, 100))], Placement((0, 1)), 8, sizes)
    [3, 2]
    >>> live_counts([LiveLimit((2, 2))], Placement((0, 1)), 8, modes=["never", "always"])
    [2, 8]
    """
    if not limits:
        return None
    inputs_count = any(limit.counts_inputs for limit in limits)
    counts = []
    for worker in range(placement.workers):
        stages = placement.stages_of(worker)
        count = max(len(stages), min(limit.room(worker, stages, sizes) for limit in limits))
        if modes and not inputs_count and all(modes[stage] != "never" for stage in stages):
            count = max(count, chunks * len(stages))
        counts.append(count)
    return counts


@dataclass(frozen=True)
class Problem:
    """What is to be chosen: any schedule on one placement, the number of micro-batches, the stages that compute again.

    ``program`` is any program with the placement, and the edges between the stages. ``chunks`` are the numbers of micro-batches
    to choose from, and ``micro_batch`` says what one costs and holds when the mini-batch is cut into so many. ``checkpoint``
    says which forwards are computed again; None leaves that to the choice. ``limits`` have to be kept by all workers.

    >>> from pippy.drivers.plan.choice.problem import LiveLimit
    >>> problem = Problem.of(make_schedule("1f1b", workers=2, chunks=4), Costs(), [LiveLimit((1, 1))])
    >>> problem.refusal(Candidate(problem.program, problem.micro_batch(4)))
    'it holds 2 stage-micro-batches on worker 0, and the limit is 1'
    """

    program: Program
    micro_batch: Callable[[int], MicroBatch]
    chunks: tuple[int, ...]
    limits: tuple[Limit, ...] = ()
    checkpoint: Checkpoint | None = None

    @classmethod
    def of(
        cls,
        program: Program,
        costs: Costs,
        limits: Sequence[Limit] = (),
        checkpoint: Checkpoint | None = "never",
        sizes: PipeBytes | None = None,
    ) -> "Problem":
        """The choice of another schedule for a program: as many micro-batches, the same stages on the same workers."""
        return cls(program, lambda _: MicroBatch(costs, sizes), (program.chunks,), tuple(limits), checkpoint)

    def made(self, name: str, chunks: int) -> Program:
        """A schedule on the placement, for the edges if there are any, which computes nothing again."""
        given, options = self.program, dict[str, Any]()
        if name == "list":
            micro_batch = self.micro_batch(chunks)
            modes = [] if self.checkpoint is None else modes_of(self.checkpoint, given.stages)
            memory = live_counts(self.limits, given.placement, chunks, micro_batch.sizes, modes)
            options = {"costs": micro_batch.costs, "memory": memory, "edges": given.edges, "added": given.added}
        made = make_schedule(name, workers=given.placement.workers, chunks=chunks, placement=given.placement, **options)
        if given.edges is None:
            return made
        return made.for_graph(given.edges, given.backward, given.replicated, added=given.added)

    def refusal(self, candidate: Candidate) -> str:
        """Says which limit a candidate breaks. It is empty if the candidate keeps all."""
        return next((why for limit in self.limits if (why := limit.refusal(candidate))), "")

    def lack(self, candidate: Candidate) -> tuple[float, ...]:
        """By how much each limit is broken: 1 where it is kept. The first limits come first."""
        return tuple(
            max(1.0, *(held / most for held, most in zip(limit.held(candidate), limit.most))) for limit in self.limits
        )

    def on(self, placement: Placement) -> "Problem":
        """The same problem with the stages elsewhere. Limits stay as they are."""
        moved = replace(
            self.program, placement=placement, orders=((),) * placement.workers, memory=None, checkpoints=(), hosts=None
        )
        return replace(self, program=moved)
