"""schedule="auto": the first steps are measured, then the schedule is chosen that the measurements make the fastest.

The steps that are measured are ordinary training steps. For each number of micro-batches:

    1        1F1B; how many bytes each stage keeps for its backward
    2, 3     1F1B, recorded: the times of F and B of each stage, and of each transfer
    4        the same order with backwards in halves
    5, 6     the same, recorded: the times of I and W of each stage
    then     every schedule that fits the placement and the limits is simulated, and the best is run from now on

With ``memory=``, all programs are those of `MemoryFit`: they fit from the first step on. Without a number of micro-batches, two
numbers are measured that fit, and then the best of all numbers is run.

1F1B is measured because it holds few activations. If it breaks the limits, an order that keeps them is measured instead. A
step that fails is measured again.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pippy.drivers.automatic.memory_fit import (
    Call,
    MemoryFit,
    Shapes,
    counts_of_chunks,
    measured_micro_batch,
    no_larger,
)
from pippy.drivers.automatic.stage_estimates import costs_by_rows
from pippy.drivers.control.messages import StepResult
from pippy.drivers.errors import DriverError, StepError
from pippy.drivers.recording.measured import measured_costs
from pippy.drivers.recording.record import Recording
from pippy.drivers.schedules import make_schedule
from pippy.drivers.schedules.choose import Choice, Limits, choose
from pippy.drivers.schedules.errors import ScheduleError
from pippy.drivers.schedules.fitting.fitted import Fitted
from pippy.drivers.schedules.fitting.search import Problem
from pippy.drivers.schedules.halves import in_halves
from pippy.drivers.schedules.programs.placement import Placement
from pippy.drivers.schedules.programs.program import Program
from pippy.drivers.schedules.recompute import Checkpoint
from pippy.drivers.schedules.simulation.costs import Costs
from pippy.drivers.schedules.simulation.held_bytes import PipeBytes, StageBytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepPurpose:
    """What a step is for: it runs the program of this name, and may be recorded, or weigh what stages keep."""

    program: str
    record: bool = False
    weigh: bool = False


UNMEASURED = StepPurpose("")  # a step of any other schedule
_MEASURED = (
    StepPurpose("first", weigh=True),
    StepPurpose("whole", record=True),
    StepPurpose("whole", record=True),
    StepPurpose("halves"),
    StepPurpose("halves", record=True),
    StepPurpose("halves", record=True),
)
_CHOSEN = StepPurpose("chosen")

Answers = Callable[[], Mapping[int, StepResult]]  # waits for a step, and gives what the workers answered
Make = Callable[[int], Program]  # makes the program of 1F1B for a number of micro-batches


@dataclass
class _Measurements:
    """The measurements so far for one number of micro-batches."""

    programs: dict[str, Program]
    limits: Limits
    checkpoint: Checkpoint
    done: int = 0
    step_under_way: tuple[Answers, Callable[[Mapping[int, StepResult]], None]] | None = None
    recording: Recording = field(default_factory=Recording)
    choice: Choice | Fitted | None = None
    error: DriverError | None = None
    costs: Costs | None = None  # as they were measured
    problem: Problem | None = None  # what has to fit into memory=
    shapes: Shapes = ()  # the largest for which it was counted
    rows: int | None = None
    version: int = 0  # how often it had to be counted again for larger shapes


@dataclass
class _Counts:
    """The numbers of micro-batches that are measured for so many rows, and the one that was chosen then."""

    shapes: Shapes
    measured: tuple[int, ...]
    chosen: int | None = None


class Auto:
    """Chooses the schedule of one driver, for each number of micro-batches that it runs.

    >>> Auto(memory_limit=-1)
    Traceback (most recent call last):
    pippy.drivers.errors.DriverError: memory_limit=-1: give the bytes that the activations on each worker may take, \
one number or one for each worker
    """

    def __init__(
        self,
        memory_limit: Any = None,
        max_live: Any = None,
        checkpoint: Checkpoint | None = None,
        memory: Any = None,
    ) -> None:
        if memory is not None and memory_limit is not None:
            raise DriverError(
                f"memory={memory!r} and memory_limit={memory_limit!r}: memory= counts activations, too; leave memory_limit out"
            )
        self.memory = None if memory is None else MemoryFit(memory, checkpoint)
        self._bytes = _numbers("memory_limit", memory_limit, "the bytes that the activations on each worker may take")
        self._live = _numbers("max_live", max_live, "how many stage-micro-batches each worker may hold")
        self.checkpoint = "never" if checkpoint is None else checkpoint
        self._measured: dict[int, _Measurements] = {}
        self._by_rows: dict[int, _Counts] = {}
        self._latest: _Measurements | None = None

    @property
    def choice(self) -> Choice | Fitted | None:
        """What was chosen for the number of micro-batches of the latest step; None while that is being measured."""
        if self._latest is not None and self._latest.choice is None:
            self._finish_step(self._latest)
        return None if self._latest is None else self._latest.choice

    def check(self, placement: Placement) -> None:
        """Raise unless the limits leave room for one micro-batch in each stage."""
        for worker, limit in enumerate(_each("max_live", self._live, placement) or ()):
            least = len(placement.stages_of(worker))
            if limit < least:
                raise DriverError(
                    f"max_live={_shown(self._live)} leaves worker {worker} no room for one micro-batch in each of its stages; "
                    f"give it at least {least}"
                )
        _each("memory_limit", self._bytes, placement)
        if self.memory is not None:
            self.memory.limits(placement)

    def next(self, chunks: int, make: Make, call: Call | None = None) -> tuple[StepPurpose, Program]:
        """What the next step with ``chunks`` micro-batches is for, and its program. Waits for a measured step first.

        ``make`` makes the program of 1F1B; with ``memory=``, for the edges of the Pipe, and ``call`` is what is to be run.
        """
        measurements = self._latest = self._measurements_for(chunks, make, call)
        if measurements.choice is None:
            self._finish_step(measurements)
        return _step(measurements)

    def peek(self, chunks: int, make: Make) -> tuple[StepPurpose, Program]:
        """What the next step would be, as far as is known now. Does not wait."""
        if self.memory is not None and chunks not in self._measured:
            raise DriverError(
                f"the program for {chunks} micro-batches is made when the shapes of a call are known: run a step, and ask then"
            )
        return _step(self._measured[chunks] if self.memory is not None else self._measurements_for(chunks, make, None))

    def count_of_chunks(self, make: Make, call: Call, trains: bool) -> int:
        """Into how many micro-batches to cut the next call, which leaves that to `memory=`. Waits for a measured step first.

        A call that does not train takes the number that is known for as many rows: it holds less.
        """
        assert self.memory is not None
        rows = self.memory.rows_to_cut(call)
        counts = self._by_rows.get(rows)
        if counts is not None and not trains:
            return counts.chosen or counts.measured[0]
        if counts is None or not no_larger(call.shapes, counts.shapes):
            counts = self._by_rows[rows] = self._counts_to_measure(make, call)
        for count in counts.measured:
            measurements = self._measurements_for(count, make, call)
            if measurements.choice is None:
                self._finish_step(measurements)
            if measurements.choice is None:
                return count
        if counts.chosen is None:
            counts.chosen = self._best_count(counts, make, call)
        return counts.chosen

    def _counts_to_measure(self, make: Make, call: Call) -> "_Counts":
        """The best number of micro-batches by guessed costs, and the next: two tell what a row takes from what each takes."""
        assert self.memory is not None and call.rows is not None
        every, plain = counts_of_chunks(call.rows), make(1)
        problem = self.memory.problem(plain, call, every, self._live_limits(plain))
        fitted = self.memory.best(problem, call.rows, measured=False)
        fitting = sorted({way.chunks for way in fitted.candidates} - {fitted.chunks})
        others = [count for count in fitting if count > fitted.chunks][:1] or fitting[-1:]
        return _Counts(call.shapes, (fitted.chunks, *others))

    def _best_count(self, counts: "_Counts", make: Make, call: Call) -> int:
        assert self.memory is not None and call.rows is not None
        known = {count: self._measured[count].costs for count in counts.measured}
        costs = {count: costs for count, costs in known.items() if costs is not None}
        estimate = measured_micro_batch(call.estimate, partial(costs_by_rows, call.rows, costs))
        every, plain, call = counts_of_chunks(call.rows), make(1), replace(call, estimate=estimate)
        problem = self.memory.problem(plain, call, every, self._live_limits(plain))
        fitted = self.memory.best(problem, call.rows, measured=True)
        before = self._measured.get(fitted.chunks)
        chosen = _Measurements({}, Limits(), self.checkpoint, len(_MEASURED), choice=fitted, shapes=call.shapes)
        chosen.costs, chosen.version = estimate(fitted.chunks).costs, 0 if before is None else before.version + 1
        self._measured[fitted.chunks] = chosen
        _log.info("schedule='auto', memory=%r: %s", self.memory.given, fitted)
        return fitted.chunks

    def _live_limits(self, plain: Program) -> tuple[int, ...] | None:
        return _each("max_live", self._live, plain.placement)

    def begin(self, chunks: int, program: Program, ranks: Sequence[int]) -> Callable[[Answers], None]:
        """Begin to measure the step that `next` gave. Gives a function to call, after sending, with how to wait for it."""
        measurements = self._measured[chunks]
        if measurements.choice is not None:
            return lambda answers: None
        purpose = _MEASURED[measurements.done]
        note = measurements.recording.begin(program, ranks, [str(rank) for rank in ranks])

        def use_answers(results: Mapping[int, StepResult]) -> None:
            if purpose.record:
                note(results)
            if purpose.weigh:
                self._weighed(measurements, [results[rank] for rank in ranks])

        def sent(answers: Answers) -> None:
            measurements.step_under_way = answers, use_answers

        return sent

    def _measurements_for(self, chunks: int, make: Make, call: Call | None) -> _Measurements:
        if self.memory is not None and call is not None:
            return self._within_memory(chunks, make, call)
        if chunks not in self._measured:
            plain = make(chunks)
            limits = Limits(
                _each("max_live", self._live, plain.placement), _each("memory_limit", self._bytes, plain.placement)
            )
            self._measured[chunks] = _Measurements(_programs(plain, limits, self.checkpoint), limits, self.checkpoint)
        return self._measured[chunks]

    def _within_memory(self, chunks: int, make: Make, call: Call) -> _Measurements:
        """The measurements for a number of micro-batches, whose programs fit this call."""
        found = self._measured.get(chunks)
        if found is not None and no_larger(call.shapes, found.shapes):
            return found
        assert self.memory is not None
        if found is not None and found.choice is None:
            self._finish_step(found)
        plain = make(chunks)
        costs = None if found is None else found.costs
        if costs is not None:
            call = replace(call, estimate=measured_micro_batch(call.estimate, lambda _: costs))
        problem = self.memory.problem(plain, call, [chunks], self._live_limits(plain))
        made = _Measurements(
            {}, Limits(), self.checkpoint, shapes=call.shapes, costs=costs, problem=problem, rows=call.rows
        )
        made.version = 0 if found is None else found.version + 1
        if costs is not None:
            made.choice = self.memory.best(problem, call.rows, measured=True)
        else:
            whole, halves = self.memory.to_measure(problem, call.rows)
            made.programs = {"plain": plain, "whole": whole, "halves": halves}
        self._measured[chunks] = made
        return made

    def _finish_step(self, measurements: _Measurements) -> None:
        """Wait for the step that is under way and use what it measured. After the last one, choose."""
        if measurements.error is not None:
            raise measurements.error
        if measurements.step_under_way is not None:
            (answers, use_answers), measurements.step_under_way = measurements.step_under_way, None
            try:
                results = answers()
            except StepError:  # the caller of that step's result() gets the error
                return
            measurements.done += 1
            try:
                use_answers(results)
                if measurements.done == len(_MEASURED):
                    self._choose(measurements)
            except DriverError as error:
                measurements.error = error
                raise

    def _choose(self, measurements: _Measurements) -> None:
        costs = measured_costs(measurements.recording.steps)
        if self.memory is None or measurements.problem is None:
            measurements.choice = _choice(measurements, costs)
        else:
            problem = measurements.problem
            problem = replace(problem, micro_batch=measured_micro_batch(problem.micro_batch, lambda _: costs))
            measurements.choice = self.memory.best(problem, measurements.rows, measured=True)
        measurements.costs, measurements.recording = costs, Recording()
        _log.info("schedule='auto': %s", measurements.choice)

    def _weighed(self, measurements: _Measurements, results: Sequence[StepResult]) -> None:
        kept = {stage: weight for result in results for stage, weight in (result.kept or {}).items()}
        plain = measurements.programs["plain"]
        weights, inputs = zip(*(kept.get(stage, (0, 0)) for stage in range(plain.stages)))
        stages = [
            StageBytes(kept=each, forward=each, deferred=each, repeating=own) for each, own in zip(weights, inputs)
        ]
        measurements.limits = replace(measurements.limits, sizes=PipeBytes(tuple(stages)))
        for worker, limit in enumerate(measurements.limits.bytes or ()):
            least = sum(weights[stage] for stage in plain.placement.stages_of(worker))
            if least > limit:
                raise DriverError(
                    f"memory_limit={_shown(self._bytes)} leaves worker {worker} no room for one micro-batch in each of its "
                    f"stages, which takes {least:,} bytes; raise it, or cut the mini-batch into more micro-batches"
                )
        if measurements.limits.bytes is not None:
            measurements.programs = _programs(plain, measurements.limits, measurements.checkpoint)


def _step(measurements: _Measurements) -> tuple[StepPurpose, Program]:
    """What the next step is for. The first step has a program of its own only if there is a limit of bytes."""
    if measurements.choice is not None:
        return _of_version(_CHOSEN, measurements), measurements.choice.program
    if measurements.problem is not None:
        purpose = replace(_MEASURED[min(measurements.done, len(_MEASURED) - 1)], weigh=False)
        purpose = replace(purpose, program="whole") if purpose.program == "first" else purpose
        return _of_version(purpose, measurements), measurements.programs[purpose.program]
    purpose = _MEASURED[min(measurements.done, len(_MEASURED) - 1)]
    if purpose.program == "first" and measurements.limits.bytes is None:
        purpose = replace(purpose, program="whole")
    return purpose, measurements.programs["whole" if purpose.program == "first" else purpose.program]


def _of_version(purpose: StepPurpose, measurements: _Measurements) -> StepPurpose:
    """With the name of a program that is counted anew for larger shapes."""
    return replace(purpose, program=f"{purpose.program}{f' {measurements.version}' if measurements.version else ''}")


def _choice(measurements: _Measurements, costs: Costs) -> Choice:
    program = measurements.recording.steps[-1].program
    try:
        return choose(program, costs, measurements.limits, measurements.checkpoint)
    except ScheduleError as error:
        raise DriverError(
            f"{error}\nraise memory_limit or max_live, or cut the mini-batch into more micro-batches"
        ) from error


def _programs(plain: Program, limits: Limits, checkpoint: Checkpoint) -> dict[str, Program]:
    """The programs to measure. They keep the limits, as far as the bytes that stages keep are known."""
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


def auto_placement(options: Mapping[str, Any], per_worker: Sequence[int]) -> dict[str, Any]:
    """Where the stages are put: as the options say, or else so that the best schedules for their number fit.

    >>> auto_placement({}, [2, 2])
    {'stages_per_worker': [2, 2], 'placement': 'v'}
    """
    for name, value in options.items():
        if name != "placement":
            raise DriverError(f"{name}={value!r}: schedule='auto' takes memory, max_live, memory_limit and placement")
    placement = options.get("placement")
    if isinstance(placement, Mapping | Placement):
        return {"placement": placement}
    if placement is None:
        even = set(per_worker)
        placement = "linear" if len(even) > 1 or 1 in even else "v" if even == {2} else "looped"
    return {"stages_per_worker": list(per_worker), "placement": placement}


def _numbers(name: str, given: Any, what: str) -> int | tuple[int, ...] | None:
    several = isinstance(given, Sequence) and not isinstance(given, str)
    numbers = list(given) if several else [] if given is None else [given]
    if (several and not numbers) or not all(
        isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in numbers
    ):
        raise DriverError(f"{name}={given!r}: give {what}, one number or one for each worker")
    return tuple(numbers) if several else given


def _each(name: str, given: int | tuple[int, ...] | None, placement: Placement) -> tuple[int, ...] | None:
    if given is None or isinstance(given, int):
        return None if given is None else (given,) * placement.workers
    if len(given) != placement.workers:
        raise DriverError(
            f"{name}={list(given)} has {len(given)} limits for {placement.workers} workers; give one, or one each"
        )
    return given


def _shown(given: Any) -> Any:
    return list(given) if isinstance(given, tuple) else given
