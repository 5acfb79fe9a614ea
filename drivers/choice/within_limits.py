"""The measured steps of `schedule="auto"` whose programs keep `max_live=` and `memory_limit=`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pippy.drivers.base.errors import DriverError
from pippy.drivers.choice.given_limit import GivenLimit
from pippy.drivers.choice.measurements import CHOSEN, Measurements, StepPurpose
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.choice.choose import Choice, Limits, choose
from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes
from pippy.drivers.plan.language.errors import ScheduleError
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.halves import in_halves
from pippy.drivers.plan.passes.recompute import Checkpoint


@dataclass
class GivenLimits:
    """`memory_limit=` and `max_live=`, as they were given."""

    bytes: GivenLimit
    live: GivenLimit

    def of_workers(self, plain: Program) -> Limits:
        return Limits(self.live.of_workers(plain.placement), self.bytes.of_workers(plain.placement))


@dataclass
class WithinLimits(Measurements):
    """Measures 1F1B, or an order within the limits; then simulates all schedules, and chooses within the limits."""

    limits: Limits = field(default_factory=Limits)
    given_bytes: GivenLimit | None = None
    checkpoint: Checkpoint = "never"

    @classmethod
    def of(cls, plain: Program, given: GivenLimits, checkpoint: Checkpoint) -> "WithinLimits":
        """The measurements that begin with the program of 1F1B."""
        limits = given.of_workers(plain)
        programs = _programs(plain, limits, checkpoint)
        return cls(programs, limits=limits, given_bytes=given.bytes, checkpoint=checkpoint)

    def next_step(self) -> tuple[StepPurpose, Program]:
        """The first step has a program of its own only if there is a limit of bytes."""
        if self.choice is not None:
            return CHOSEN, self.choice.program
        purpose = self.purpose
        if purpose.program == "first" and self.limits.bytes is None:
            purpose = replace(purpose, program="whole")
        return purpose, self.programs["whole" if purpose.program == "first" else purpose.program]

    def choose(self, costs: Costs) -> Choice:
        program = self.recording.steps[-1].program
        try:
            return choose(program, costs, self.limits, self.checkpoint)
        except ScheduleError as error:
            raise DriverError(
                f"{error}\nraise memory_limit or max_live, or cut the mini-batch into more micro-batches"
            ) from error

    def weighed(self, kept: Mapping[int, tuple[int, int]]) -> None:
        plain = self.programs["plain"]
        weights, inputs = zip(*(kept.get(stage, (0, 0)) for stage in range(plain.stages)))
        stages = [
            StageBytes(kept=each, forward=each, deferred=each, repeating=own) for each, own in zip(weights, inputs)
        ]
        self.limits = replace(self.limits, sizes=PipeBytes(tuple(stages)))
        for worker, limit in enumerate(self.limits.bytes or ()):
            least = sum(weights[stage] for stage in plain.placement.stages_of(worker))
            if least > limit:
                raise DriverError(
                    f"{self.given_bytes} leaves worker {worker} no room for one micro-batch in each of its stages, which takes "
                    f"{least:,} bytes; raise it, or cut the mini-batch into more micro-batches"
                )
        if self.limits.bytes is not None:
            self.programs = _programs(plain, self.limits, self.checkpoint)


def _programs(plain: Program, limits: Limits, checkpoint: Checkpoint) -> dict[str, Program]:
    """The programs to measure. They stay within the limits, as far as the bytes that stages keep are known."""
    counts = limits.counts(plain.placement)
    whole = plain
    if counts is not None and not _fits(plain, counts, limits):
        whole = make_schedule(
            "list",
            workers=plain.workers,
            chunks=plain.chunks,
            placement=plain.placement,
            checkpoint=checkpoint,
            memory=counts,
            halves=False,
        )
    return {"plain": plain, "whole": whole, "halves": in_halves(whole)}


def _fits(program: Program, counts: Sequence[int], limits: Limits) -> bool:
    if limits.bytes is None or limits.sizes is None:
        return all(peak <= count for peak, count in zip(program.peak_live, counts))
    peaks = limits.peaks(program)
    assert peaks is not None
    live = limits.live or program.peak_live
    return all(map(int.__le__, peaks, limits.bytes)) and all(map(int.__le__, program.peak_live, live))
