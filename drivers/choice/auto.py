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
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.choice.divided_call import CallShapes, DividedCall, no_larger
from pippy.drivers.choice.given_limits import GivenLimits
from pippy.drivers.choice.measured_programs import programs_that_fit, programs_within
from pippy.drivers.choice.measurements import Answers, Measurements, StepPurpose, with_measured_costs
from pippy.drivers.choice.stage_estimates import costs_by_rows
from pippy.drivers.plan.choice.candidate import MicroBatch
from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.choice.problem import Problem
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.recompute import Checkpoint
from pippy.ir.base.readable import brief

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
