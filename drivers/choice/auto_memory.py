"""schedule="auto" with memory=: all programs fit, from the first step on.

Bytes are counted before the first step, and again for larger shapes. Costs are guessed until they are measured (auto.py).
If a call gives no number of micro-batches, two numbers that fit are measured, and then the best of all numbers runs.
"""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.choice.auto import Auto, Make
from pippy.drivers.choice.measurements import StepPurpose
from pippy.drivers.choice.memory_fit import (
    CallShapes,
    DividedCall,
    MemoryFit,
    counts_of_chunks,
    measured_micro_batch,
    no_larger,
)
from pippy.drivers.choice.stage_estimates import costs_by_rows
from pippy.drivers.choice.within_memory import WithinMemory
from pippy.drivers.plan.choice.search import Problem
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.recompute import Checkpoint

_log = logging.getLogger(__name__)


@dataclass
class _Counts:
    """For one number of rows: the numbers of micro-batches to measure, and the one that was chosen after that."""

    shapes: CallShapes
    measured: tuple[int, ...]
    chosen: int | None = None


class AutoWithinMemory(Auto[WithinMemory]):
    """Chooses among what fits into ``memory``, a number of bytes for each worker."""

    counts_bytes = True

    def __init__(self, memory: Any, max_live: Any = None, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(max_live)
        self.memory = MemoryFit(memory, checkpoint)
        self._by_rows: dict[int, _Counts] = {}

    def check(self, placement: Placement) -> None:
        super().check(placement)
        self.memory.limits(placement)

    def peek(self, chunks: int, make: Make) -> tuple[StepPurpose, Program]:
        if chunks not in self._measured:
            raise DriverError(
                f"the program for {chunks} micro-batches does not exist yet, because it depends on the shapes of a "
                "call; run a step first"
            )
        return self._measured[chunks].next_step()

    def count_of_chunks(self, make: Make, call: DividedCall, trains: bool) -> int:
        """The number of micro-batches for a call that gives none. Waits first for a step that is measured.

        A call that does not train holds less, so it takes the number that was chosen for as many rows.
        """
        rows = self.memory.rows_to_cut(call)
        counts = self._by_rows.get(rows)
        if counts is not None and not trains:
            return counts.chosen or counts.measured[0]
        if counts is None or not no_larger(call.shapes, counts.shapes):
            counts = self._by_rows[rows] = self._counts_to_measure(make, call)
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
        fitted = self.memory.best(self._every_count(make, call), call.rows, measured=False)
        fitting = sorted({way.chunks for way in fitted.candidates} - {fitted.chunks})
        others = [count for count in fitting if count > fitted.chunks][:1] or fitting[-1:]
        return _Counts(call.shapes, (fitted.chunks, *others))

    def _best_count(self, counts: _Counts, make: Make, call: DividedCall) -> int:
        assert call.rows is not None
        known = {count: self._measured[count].costs for count in counts.measured}
        costs = {count: costs for count, costs in known.items() if costs is not None}
        estimate = measured_micro_batch(call.estimate, partial(costs_by_rows, call.rows, costs))
        problem = self._every_count(make, replace(call, estimate=estimate))
        fitted = self.memory.best(problem, call.rows, measured=True)
        before = self._measured.get(fitted.chunks)
        chosen = WithinMemory(
            {}, choice=fitted, memory=self.memory, problem=problem, rows=call.rows, shapes=call.shapes
        )
        chosen.costs, chosen.version = estimate(fitted.chunks).costs, 0 if before is None else before.version + 1
        self._measured[fitted.chunks] = chosen
        _log.info("schedule='auto', memory=%r: %s", self.memory.given, fitted)
        return fitted.chunks

    def _every_count(self, make: Make, call: DividedCall) -> Problem:
        assert call.rows is not None
        plain = make(1)
        return self.memory.problem(plain, call, counts_of_chunks(call.rows), self._live.of_workers(plain.placement))

    def _measurements_for(self, chunks: int, make: Make, call: DividedCall | None) -> WithinMemory:
        """The measurements whose programs fit this call."""
        found = self._measured.get(chunks)
        assert call is not None
        if found is not None and no_larger(call.shapes, found.shapes):
            return found
        if found is not None:
            self._finish_step(found)
        plain = make(chunks)
        problem = self.memory.problem(plain, call, [chunks], self._live.of_workers(plain.placement))
        made = self._measured[chunks] = WithinMemory.of(self.memory, plain, problem, call, found)
        return made
