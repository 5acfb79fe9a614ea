"""schedule="auto": the first steps are measured, then the schedule runs that is the fastest by what was measured.

The steps that are measured are ordinary training steps. For each number of micro-batches:

    1        a program with whole backwards
    2, 3     the same, recorded: the times of F and B of each stage, and of each transfer
    4        the same order with backwards in halves
    5, 6     the same, recorded: the times of I and W of each stage
    then     every schedule that fits the placement and the limits is simulated, and the best is run from now on

Without a limit of bytes, 1F1B is measured, because it holds few activations. If it holds more than max_live=, an order that
does not is measured instead. With memory= or memory_limit=, all programs fit, from the first step on: bytes are counted before
it, and again for larger shapes, and the order that is measured is the fastest by guessed costs. If a call then gives no number
of micro-batches, two numbers that fit are measured, and then the best of all numbers runs. A step that fails is measured
again, and so is one in which graphs of stages were recorded or compiled: that is no part of later steps.

`Measurements` are the steps that `schedule="auto"` measures for one number of micro-batches: both programs keep the limits.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.choice.given_limits import CallShapes, DividedCall, GivenLimits, costs_by_rows, no_larger
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.choice.problem import Candidate, MicroBatch, Problem, live_counts
from pippy.drivers.plan.cost.simulate import Costs
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.rewrites import Checkpoint, has_halves, in_halves
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.report.record import Recording
from pippy.drivers.report.step_data import measured_costs
from pippy.ir.base.readable import brief

MeasuredPrograms = Mapping[str, Program]  # with whole backwards and with halves, as `MEASURED_STEPS` calls them


def programs_that_fit(choice: Choice) -> MeasuredPrograms:
    """The fastest of the candidates with whole backwards whose order with halves keeps the limits, too."""
    without_halves = [each for each in choice.candidates if not has_halves(each.program)]
    for each in without_halves:
        halves = in_halves(each.program)
        if not choice.problem.refusal(Candidate(halves, each.micro_batch)):
            return {"whole": each.program, "halves": halves}
    program = (without_halves or choice.candidates)[0].program
    return {"whole": program, "halves": program}


def programs_within(problem: Problem) -> MeasuredPrograms:
    """The program of the problem, or if it holds too many micro-batches, an order of as many as there is room for."""
    program, placement = problem.program, problem.program.placement
    if problem.refusal(Candidate(program, problem.micro_batch(program.chunks))):
        program = make_schedule(
            "list",
            workers=program.workers,
            chunks=program.chunks,
            placement=placement,
            checkpoint=problem.checkpoint or "never",
            memory=live_counts(problem.limits, placement, program.chunks),
            halves=False,
        )
    return {"whole": program, "halves": in_halves(program)}


@dataclass(frozen=True)
class StepPurpose:
    """The purpose of a step: the name of its program, and whether it is recorded."""

    program: str
    record: bool = False


UNMEASURED = StepPurpose("")  # a step of any other schedule
MEASURED_STEPS = (
    StepPurpose("whole"),
    StepPurpose("whole", record=True),
    StepPurpose("whole", record=True),
    StepPurpose("halves"),
    StepPurpose("halves", record=True),
    StepPurpose("halves", record=True),
)
CHOSEN = StepPurpose("chosen")

Answers = Callable[[], Mapping[int, StepResult]]  # waits for a step, and gives what the workers answered


@dataclass
class Measurements:
    """The measurements so far, and the choice once they are complete."""

    problem: Problem
    limits: GivenLimits
    programs: MeasuredPrograms | None = None
    costs: Costs | None = None  # as they were measured
    choice: Choice | None = None
    shapes: CallShapes = ()  # the largest for which bytes were counted
    version: int = 0  # how often they had to be counted again for larger shapes
    done: int = 0
    step_under_way: tuple[Answers, Callable[[Mapping[int, StepResult]], None]] | None = None
    recording: Recording = field(default_factory=Recording)
    error: DriverError | None = None

    def next_step(self) -> tuple[StepPurpose, Program]:
        """The purpose of the next step, and its program."""
        if self.choice is not None:
            purpose, program = CHOSEN, self.choice.program
        else:
            assert self.programs is not None
            purpose, program = self._purpose, self.programs[self._purpose.program]
        name = f"{purpose.program} {self.version}" if self.version else purpose.program
        return replace(purpose, program=name), program

    @property
    def _purpose(self) -> StepPurpose:
        """The purpose of the next step that is measured."""
        return MEASURED_STEPS[min(self.done, len(MEASURED_STEPS) - 1)]

    def begin(self, program: Program, ranks: Sequence[int]) -> Callable[[Answers], None]:
        """Begin to measure a step. Returns a function to call after sending, with what waits for the step."""
        if self.choice is not None:
            return lambda answers: None
        note = self.recording.begin(program, ranks, [str(rank) for rank in ranks])

        def sent(answers: Answers) -> None:
            self.step_under_way = answers, note

        return sent

    def finish_step(self) -> None:
        """Wait for the step that is under way and use what it measured. After the last one, choose."""
        if self.error is not None:
            raise self.error
        if self.choice is not None or self.step_under_way is None:
            return
        (answers, note), self.step_under_way = self.step_under_way, None
        try:
            results = answers()
        except StepError:  # the caller of that step's result() gets the error
            return
        if self._purpose.record:
            if any(each.prepared for each in results.values()):
                return  # its times are those of recording and compiling
            note(results)
        self.done += 1
        if self.done == len(MEASURED_STEPS):
            self._choose()

    def _choose(self) -> None:
        self.costs = measured_costs(self.recording.steps)
        problem = replace(self.problem, program=self.recording.steps[-1].program)  # which has the edges
        try:
            self.choice = self.limits.best(with_measured_costs(problem, self.costs))
        except DriverError as error:
            self.error = error
            raise
        self.recording = Recording()


def with_measured_costs(problem: Problem, costs: Costs | Callable[[int], Costs]) -> Problem:
    """The problem with measured costs in place of guessed ones: for all numbers of micro-batches, or for each."""
    guessed, known = problem.micro_batch, costs if callable(costs) else lambda _: costs
    return replace(problem, micro_batch=lambda chunks: replace(guessed(chunks), costs=known(chunks)))


_log = logging.getLogger(__name__)

Make = Callable[[int], Program]  # makes the program of 1F1B for a number of micro-batches


@dataclass
class _Counts:
    """For one number of rows: the numbers of micro-batches to measure, and the one that was chosen after that."""

    shapes: CallShapes
    measured: tuple[int, ...]
    chosen: int | None = None


class Auto:
    """Chooses the schedule of one driver, for each number of micro-batches that it runs, within the limits that were given.

    Without ``checkpoint``, the stages that compute forwards again are chosen, if bytes are counted.

    >>> Auto(max_live=-1)
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: max_live=-1: give how many stage-micro-batches each worker may hold, \
one number or one for each worker
    """

    def __init__(
        self, memory: Any = None, memory_limit: Any = None, max_live: Any = None, checkpoint: Checkpoint | None = None
    ) -> None:
        self.limits = GivenLimits(memory, memory_limit, max_live)
        self.checkpoint = checkpoint if checkpoint is not None or self.counts_bytes else "never"
        self._measured: dict[int, Measurements] = {}
        self._latest: Measurements | None = None
        self._by_rows: dict[int, _Counts] = {}

    def forget(self) -> None:
        """Measure again: the stages are on other workers."""
        self._measured, self._latest, self._by_rows = {}, None, {}

    @property
    def counts_bytes(self) -> bool:
        """Whether it needs the edges of the Pipe, and the call that is to be run."""
        return self.limits.bytes is not None

    @property
    def choice(self) -> Choice | None:
        """The choice for the number of micro-batches of the latest step; None while its steps are measured."""
        if self._latest is None:
            return None
        self._finish_step(self._latest)
        return self._latest.choice

    def next(self, chunks: int, make: Make, call: DividedCall | None = None) -> tuple[StepPurpose, Program]:
        """The purpose and the program of the next step with ``chunks`` micro-batches. Waits first for a step that is measured.

        ``make`` makes the program of 1F1B; where bytes are counted, it has the edges of the Pipe. ``call`` is the call to run.
        """
        measurements = self._latest = self._measurements_for(chunks, make, call)
        self._finish_step(measurements)
        return measurements.next_step()

    def peek(self, chunks: int, make: Make) -> tuple[StepPurpose, Program]:
        """The purpose and the program of the next step, as far as they are known now. Does not wait."""
        if chunks not in self._measured and self.counts_bytes:
            raise DriverError(
                f"the program for {chunks} micro-batches does not exist yet, because it depends on the shapes of a "
                "call; run a step first"
            )
        return self._measurements_for(chunks, make, None).next_step()

    def begin(self, chunks: int, program: Program, ranks: Sequence[int]) -> Callable[[Answers], None]:
        """Begin to measure the step that `next` gave. Returns a function to call after sending, with what waits for it."""
        return self._measured[chunks].begin(program, ranks)

    def count_of_chunks(self, make: Make, call: DividedCall, trains: bool) -> int:
        """The number of micro-batches for a call that gives none. Waits first for a step that is measured.

        A call that does not train holds less, so it takes the number that was chosen for as many rows.
        """
        counts = self._by_rows.get(call.rows_to_cut)
        if counts is not None and not trains:
            return counts.chosen or counts.measured[0]
        if counts is None or not no_larger(call.shapes, counts.shapes):
            counts = self._by_rows[call.rows_to_cut] = self._counts_to_measure(make, call)
        for count in counts.measured:
            measurements = self._measurements_for(count, make, call)
            self._finish_step(measurements)
            if measurements.choice is None:
                return count
        if counts.chosen is None:
            counts.chosen = self._best_count(counts, make, call)
        return counts.chosen

    def _counts_to_measure(self, make: Make, call: DividedCall) -> _Counts:
        """The two best numbers of micro-batches by guessed costs. Two show what a row costs, and what a micro-batch costs."""
        choice = self.limits.best(self._every_count(make, call), measured=False)
        fitting = sorted({each.chunks for each in choice.candidates} - {choice.chunks})
        others = [count for count in fitting if count > choice.chunks][:1] or fitting[-1:]
        return _Counts(call.shapes, (choice.chunks, *others))

    def _best_count(self, counts: _Counts, make: Make, call: DividedCall) -> int:
        known = {count: self._measured[count].costs for count in counts.measured}
        costs = {count: costs for count, costs in known.items() if costs is not None}
        problem = with_measured_costs(self._every_count(make, call), partial(costs_by_rows, call.rows_to_cut, costs))
        choice = self.limits.best(problem)
        self._measured[choice.chunks] = Measurements(
            problem,
            self.limits,
            costs=problem.micro_batch(choice.chunks).costs,
            choice=choice,
            shapes=call.shapes,
            version=self._next_version(choice.chunks),
        )
        _log.info("schedule='auto', %s%r: %s", self.limits.option, self.limits.bytes, choice)
        return choice.chunks

    def _every_count(self, make: Make, call: DividedCall) -> Problem:
        return self._problem(make(1), call, call.counts)

    def _problem(self, plain: Program, call: DividedCall | None, chunks: Sequence[int]) -> Problem:
        """What is to be chosen for a call, cut into one of the numbers ``chunks``. ``plain`` has the placement."""
        micro_batch = MicroBatch()
        estimate = partial(self.limits.counted, call.estimate) if call is not None else lambda _: micro_batch
        return Problem(plain, estimate, tuple(chunks), self.limits.on(plain.placement), self.checkpoint)

    def _measurements_for(self, chunks: int, make: Make, call: DividedCall | None) -> Measurements:
        """The measurements whose programs fit this call. If larger shapes are to be counted, known costs are used again."""
        before = self._measured.get(chunks)
        if before is not None and (call is None or no_larger(call.shapes, before.shapes)):
            return before
        if before is not None:
            self._finish_step(before)
        problem = self._problem(make(chunks), call, [chunks])
        measurements = Measurements(problem, self.limits, version=self._next_version(chunks))
        if call is None:
            measurements.programs = programs_within(problem)
        else:
            measurements.shapes = call.shapes
            more = call.counts_above(chunks)
            if before is not None and before.costs is not None:
                measurements.costs = before.costs
                measurements.choice = self.limits.best(with_measured_costs(problem, before.costs), more)
            else:
                measurements.programs = programs_that_fit(self.limits.best(problem, more, measured=False))
        self._measured[chunks] = measurements
        return measurements

    def _next_version(self, chunks: int) -> int:
        return self._measured[chunks].version + 1 if chunks in self._measured else 0

    def _finish_step(self, measurements: Measurements) -> None:
        known = measurements.choice
        measurements.finish_step()
        if measurements.choice is not known:
            _log.info("schedule='auto': %s", measurements.choice)


def auto_placement(options: Mapping[str, Any], per_worker: Sequence[int]) -> dict[str, Any]:
    """Where the stages are put: as the options say, or else so that the best schedules for their number fit.

    >>> auto_placement({}, [2, 2])
    {'stages_per_worker': [2, 2], 'placement': 'v'}
    """
    for name, value in options.items():
        if name != "placement":
            raise DriverError(
                f"{name}={brief(value)}: schedule='auto' takes memory, max_live, memory_limit and placement"
            )
    placement = options.get("placement")
    if isinstance(placement, Mapping | Placement):
        return {"placement": placement}
    if placement is None:
        even = set(per_worker)
        placement = "linear" if len(even) > 1 or 1 in even else "v" if even == {2} else "looped"
    return {"stages_per_worker": list(per_worker), "placement": placement}
