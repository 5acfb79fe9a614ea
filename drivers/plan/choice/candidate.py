"""A candidate of the choice: a program for a number of micro-batches, what its step takes, and what its workers hold."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.cost.held_bytes import PipeBytes, lowered_program, peak_bytes
from pippy.drivers.plan.cost.simulate import simulate_with
from pippy.drivers.plan.language.program import Program

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
