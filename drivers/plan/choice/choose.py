"""Chooses the schedule for a placement: each one that fits is simulated, and the fastest is chosen.

Schedules whose times differ by less than `TIE` count as equally fast. Of those, the one that holds least is chosen. Costs are
in seconds.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.cost.held_bytes import PipeBytes, peak_bytes
from pippy.drivers.plan.cost.simulate import simulate_with
from pippy.drivers.plan.language.errors import ArgumentError, ScheduleError
from pippy.drivers.plan.language.placement import SHAPES, Placement, make_placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.make import make_schedule
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.communicate import add_communication
from pippy.drivers.plan.passes.recompute import Checkpoint, add_recompute, modes_of

TIE = 0.02
SEARCHED = 2000  # with more computations than this, the list scheduler takes many seconds


@dataclass(frozen=True)
class Limits:
    """The most that each worker may hold: live stage-micro-batches, and bytes. None stands for no limit.

    ``sizes`` are the bytes of stages and values that count against the limit.

    >>> from pippy.drivers.plan.cost.held_bytes import StageBytes
    >>> limits = Limits(bytes=(100, 100), sizes=PipeBytes((StageBytes(kept=30), StageBytes(kept=40))))
    >>> limits.counts(Placement((0, 1)))
    [3, 2]
    """

    live: tuple[int, ...] | None = None
    bytes: tuple[int, ...] | None = None
    sizes: PipeBytes | None = None

    def peaks(self, program: Program) -> tuple[int, ...] | None:
        """The most bytes that each worker holds in a program, if it is known what a stage holds."""
        return None if self.sizes is None else peak_bytes(program, self.sizes)

    def counts(self, placement: Placement) -> list[int] | None:
        """How many stage-micro-batches each worker may hold, whichever they are. It is never less than its number of stages."""
        if self.live is None and self.bytes is None:
            return None
        found = []
        for worker in range(placement.workers):
            stages = placement.stages_of(worker)
            least = len(stages)
            counts = [] if self.live is None else [self.live[worker]]
            if self.bytes is not None:
                largest = max((self.sizes.stages[stage].kept for stage in stages), default=0) if self.sizes else 0
                counts.append(self.bytes[worker] // largest if largest else least)
            found.append(max(least, min(counts)))
        return found

    def broken_by(self, candidate: "Candidate") -> str:
        """Says what a program holds that is too much. It is empty if the program fits."""
        for name, peaks, limits in (
            ("stage-micro-batches", candidate.peak_live, self.live),
            ("bytes", candidate.peak_bytes, self.bytes),
        ):
            for worker, (peak, limit) in enumerate(zip(peaks or (), limits or ())):
                if peak > limit:
                    return f"it holds {peak:,} {name} on worker {worker}, and the limit is {limit:,}"
        return ""


@dataclass(frozen=True)
class Candidate:
    """A schedule that could be chosen: its program, its predicted time, and the most that its workers hold."""

    program: Program
    seconds: float
    peak_bytes: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.program.schedule

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """The most stage-micro-batches that each worker holds."""
        return self.program.peak_live

    @property
    def memory(self) -> tuple[int, int]:
        """What the fullest worker holds, and what all workers hold. Candidates are compared by this."""
        peaks = self.peak_bytes or self.peak_live
        return max(peaks), sum(peaks)


SomeCandidate = TypeVar("SomeCandidate", bound=Candidate)


@dataclass(frozen=True)
class Chosen(ABC, Generic[SomeCandidate]):
    """What was chosen, and from which candidates, the fastest first. Print it to read it."""

    chosen: SomeCandidate
    candidates: tuple[SomeCandidate, ...]

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self.chosen.name

    @property
    def program(self) -> Program:
        """The chosen program."""
        return self.chosen.program

    @property
    @abstractmethod
    def why(self) -> str:
        """What was chosen and why, in a sentence."""

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """The text, line by line."""

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True)
class Choice(Chosen[Candidate]):
    """What was chosen, from which candidates, and why. Print it to read it.

    ``candidates`` are the schedules that fit the placement and the limits, the fastest first. ``left_out`` lists the others,
    with the reason. ``elsewhere`` lists the fastest on other placements of the same stages.

    >>> from pippy.drivers.plan import make_schedule
    >>> slow = Costs(forward=[0.001, 0.003], backward_input=0.001, backward_weight=0.001)
    >>> choice = choose(make_schedule("1f1b", workers=2, chunks=4), slow)
    >>> print(choice.chosen.name, f"{choice.chosen.seconds:.3f}")
    zb_h1 0.021
    """

    left_out: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[tuple[str, Candidate], ...] = ()

    @property
    def why(self) -> str:
        """Why this schedule was chosen, in a sentence."""
        fastest = self.candidates[0]
        predicted = f"its step is predicted to take {_milliseconds(self.chosen.seconds)}"
        if len(self.candidates) == 1:
            return f"{self.schedule}: {predicted}; nothing else fits"
        if self.chosen is not fastest:
            return f"{self.schedule}: {predicted}, hardly more than that of {fastest.name}, and its workers hold less"
        beaten = [each for each in self.candidates if each.seconds > fastest.seconds * (1 + TIE)]
        ties = [each.name for each in self.candidates[1:] if each not in beaten]
        text = f"{self.schedule}: {predicted}"
        if beaten:
            text += f", that of {beaten[0].name} {beaten[0].seconds / fastest.seconds - 1:.0%} longer"
        return text + (f"; {', '.join(ties)} would take about as long, and hold no less" if ties else "")

    def lines(self) -> Iterator[str]:
        """The text, line by line."""
        yield f"{self.program.chunks} micro-batches, stages on workers {self.program.placement}: {self.why}"
        rows = [self._row(each) for each in self.candidates]
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            name, *rest = (
                cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
            )
            yield "  ".join([f"  {name}", *rest]).rstrip()
        for shape, other in self.elsewhere:
            yield (
                f"  with placement={shape!r}, {other.name} would take {_milliseconds(other.seconds)}: that takes another "
                "driver, because stages stay where they are"
            )
        yield from (f"  left out: {name}: {why}" for name, why in self.left_out)

    def _row(self, candidate: Candidate) -> tuple[str, ...]:
        bytes = "" if candidate.peak_bytes is None else f"{max(candidate.peak_bytes):,} bytes"
        chosen = "<- chosen" if candidate is self.chosen else ""
        return (
            candidate.name,
            _milliseconds(candidate.seconds),
            f"peak {' '.join(map(str, candidate.peak_live))}",
            bytes,
            chosen,
        )


def choose(program: Program, costs: Costs, limits: Limits = Limits(), checkpoint: Checkpoint = "never") -> Choice:
    """The best schedule for the stages, the placement and the edges of ``program``, with forwards computed again as it says.

    >>> from pippy.drivers.plan import make_schedule
    >>> choose(make_schedule("1f1b", workers=2, chunks=4), Costs(), Limits(live=(1, 1))).chosen.peak_live
    (1, 1)
    """
    fitting, left_out = candidates(program, program.placement, costs, limits, checkpoint)
    if not fitting:
        raise ArgumentError(
            "no schedule stays within the limits:\n" + "\n".join(f"  {name}: {why}" for name, why in left_out)
        )
    fitting.sort(key=lambda each: each.seconds)
    chosen = lightest_of_fastest(fitting)
    return Choice(
        chosen, tuple(fitting), tuple(left_out), tuple(_elsewhere(program, costs, limits, checkpoint, chosen))
    )


def lightest_of_fastest(candidates: Sequence[SomeCandidate]) -> SomeCandidate:
    """The one to take: of those that take hardly longer than the fastest, the one that holds least."""
    fastest = min(each.seconds for each in candidates)
    return min((each for each in candidates if each.seconds <= fastest * (1 + TIE)), key=lambda each: each.memory)


def made_like(program: Program, name: str, placement: Placement, chunks: int, **options: Any) -> Program:
    """A schedule on a placement of the stages of a program, for its edges if it has any."""
    made = make_schedule(name, workers=placement.workers, chunks=chunks, placement=placement, **options)
    return made if program.edges is None else made.for_graph(program.edges, program.backward, program.replicated)


def candidates(
    program: Program,
    placement: Placement,
    costs: Costs,
    limits: Limits,
    checkpoint: Checkpoint = "never",
    search: bool = True,
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """The schedules that work on a placement within the limits; and the others, each with the reason."""
    fitting, left_out = [], []
    for name, entry in REGISTRY.items():
        if not entry.training or (name == "list" and not search):
            continue
        try:
            found = _candidate(name, program, placement, costs, limits, checkpoint)
        except ScheduleError as error:
            left_out.append((name, str(error).partition("; ")[0]))
            continue
        if broken := limits.broken_by(found):
            left_out.append((name, broken))
        else:
            fitting.append(found)
    return fitting, left_out


def _candidate(
    name: str, program: Program, placement: Placement, costs: Costs, limits: Limits, checkpoint: Checkpoint
) -> Candidate:
    options: dict[str, Any] = {}
    if name == "list":
        if 3 * placement.stages * program.chunks > SEARCHED:
            raise ArgumentError("a search over so many computations takes long")
        options = {
            "costs": costs,
            "memory": list_limits(placement, program.chunks, limits, checkpoint),
            "edges": program.edges,
        }
    made = add_recompute(made_like(program, name, placement, program.chunks, **options), checkpoint)
    lowered = add_communication(made)
    return Candidate(made, float(simulate_with(lowered, costs).makespan), limits.peaks(lowered))


def list_limits(placement: Placement, chunks: int, limits: Limits, checkpoint: Checkpoint) -> list[int] | None:
    """How many stage-micro-batches the list scheduler may begin on each worker: a worker that computes all again, any number.

    >>> list_limits(Placement((0, 1)), 8, Limits(live=(2, 2)), {1: "always"})
    [2, 8]
    """
    counts, modes = limits.counts(placement), modes_of(checkpoint, placement.stages)
    if counts is None:
        return None
    again = [
        all(modes[stage] != "never" for stage in placement.stages_of(worker)) for worker in range(placement.workers)
    ]
    most = [chunks * len(placement.stages_of(worker)) for worker in range(placement.workers)]
    return [max(pair) if all_again else pair[0] for all_again, pair in zip(again, zip(counts, most))]


def _elsewhere(
    program: Program, costs: Costs, limits: Limits, checkpoint: Checkpoint, chosen: Candidate
) -> Iterator[tuple[str, Candidate]]:
    """The fastest schedule on each other placement, if it is faster than the chosen one."""
    placement = program.placement
    seen = {placement}
    counts = [len(placement.stages_of(worker)) for worker in range(placement.workers)]
    for shape in SHAPES:
        other = make_placement(placement.workers, counts, shape)
        if other not in seen:
            seen.add(other)
            found, _ = candidates(program, other, costs, limits, checkpoint, search=False)
            best = min(found, key=lambda each: each.seconds, default=None)
            if best is not None and best.seconds * (1 + TIE) < chosen.seconds:
                yield shape, best


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
