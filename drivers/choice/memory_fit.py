"""`memory=` of a driver with `schedule="auto"`: each step fits, the first one too, and the choice is the fastest that does.

shapes no larger than those counted   what was chosen for those fits
larger shapes                         bytes are counted on fake tensors; costs are those measured, or guessed from FLOPs
before costs are measured             an order is searched that fits with whole backwards, and with halves
after that                            all schedules are searched, with the measured costs
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.division import Division
from pippy.drivers.plan.choice.byte_sizes import limits_of
from pippy.drivers.plan.choice.fitted import Fitted
from pippy.drivers.plan.choice.search import Found, MicroBatch, Problem, search
from pippy.drivers.plan.choice.unfit import unfit
from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.cost.held_bytes import peak_bytes
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.halves import has_halves, in_halves
from pippy.drivers.plan.passes.recompute import Checkpoint
from pippy.ir.base.trees import tensors

CallShapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DividedCall:
    """The arguments of one call of a driver. ``divided`` cuts them into micro-batches; ``estimate`` says what one takes.

    ``optimizers`` is the number of the driver's optimizers, whose states are counted too.
    """

    arguments: tuple[Any, ...]
    optimizers: int
    divided: Callable[[int], Division]
    estimate: Callable[[int], MicroBatch]

    @cached_property
    def rows(self) -> int | None:
        """The number of rows of the mini-batch; None if nothing in it has rows."""
        sizes = self.divided(1).sizes
        return None if sizes is None else sum(sizes)

    @cached_property
    def shapes(self) -> CallShapes:
        """All that the bytes depend on: the number of optimizers, whether autocast is in force, the shapes of the tensors."""
        casts = (1,) * torch._C._is_any_autocast_enabled()
        return ((self.optimizers,), casts, *(tuple(tensor.shape) for tensor in tensors(self.arguments)))


def no_larger(shapes: CallShapes, counted: CallShapes) -> bool:
    """Whether no tensor of ``shapes`` is larger than the one of ``counted`` in its place.

    >>> no_larger(((8, 3), ()), ((8, 4), ())), no_larger(((9, 3),), ((8, 4),)), no_larger(((8,),), ((8, 4),))
    (True, False, False)
    """
    return len(shapes) == len(counted) and all(
        len(one) == len(other) and all(map(int.__le__, one, other)) for one, other in zip(shapes, counted)
    )


class MemoryFit:
    """The limits that a driver was given with ``memory=``, and the searches within them.

    Without ``checkpoint``, the stages that compute forwards again are chosen. ``option`` is how errors name the limits.
    """

    def __init__(self, given: Any, checkpoint: Checkpoint | None, option: str = "memory=") -> None:
        self.given, self.checkpoint, self.option = given, checkpoint, option

    def limits(self, placement: Placement) -> tuple[int, ...]:
        """The bytes that each worker may hold."""
        return limits_of(self.given, placement.workers, self.option)

    def rows_to_cut(self, call: DividedCall) -> int:
        """The number of rows of a call that gives no number of micro-batches. Raises if it has none."""
        if call.rows is None:
            raise DriverError(
                "chunks=None: no argument has rows to cut; give the number of micro-batches, as in driver.run(1, x, target)"
            )
        return call.rows

    def problem(
        self, plain: Program, call: DividedCall, chunks: Sequence[int], live: tuple[int, ...] | None
    ) -> Problem:
        """The problem: a call, cut into one of the numbers ``chunks``, must fit. ``plain`` has the placement and the edges."""
        return Problem(plain, self.limits(plain.placement), call.estimate, tuple(chunks), self.checkpoint, live)

    def best(self, problem: Problem, rows: int | None, measured: bool) -> Fitted:
        """The fastest way that fits. If none fits, the error says what would."""
        return Fitted.of(self.fitting(problem, rows, thorough=measured), problem.limits, measured)

    def fitting(self, problem: Problem, rows: int | None, thorough: bool) -> Found:
        """All ways that fit."""
        found = search(problem, thorough)
        if not found.ways:
            more = [each for each in counts_of_chunks(rows or 1) if each > max(problem.chunks)]
            raise DriverError(unfit(problem, found, repr(self.given), more, self.option).message)
        return found

    def to_measure(self, problem: Problem, rows: int | None) -> tuple[Program, Program]:
        """The programs of the steps that are measured: with whole backwards, and with halves. Both fit."""
        ways = self.fitting(problem, rows, thorough=False).ways
        sizes = problem.micro_batch(problem.chunks[0]).sizes
        whole = [way for way in ways if not has_halves(way.program)]
        for way in whole:
            halves = in_halves(way.program)
            if all(map(int.__le__, peak_bytes(halves, sizes), problem.limits)):
                return way.program, halves
        program = (whole or ways)[0].program
        return program, program


def measured_micro_batch(
    sizes_of: Callable[[int], MicroBatch], costs: Callable[[int], Costs]
) -> Callable[[int], MicroBatch]:
    """What a micro-batch takes, with measured costs in place of guessed ones."""
    return lambda chunks: replace(sizes_of(chunks), costs=costs(chunks))


def counts_of_chunks(rows: int) -> list[int]:
    """The numbers of micro-batches to try for so many rows. Most divide the rows, and each is clearly more than the last.

    >>> counts_of_chunks(8), counts_of_chunks(60), counts_of_chunks(17)
    ([1, 2, 4, 8], [1, 2, 3, 5, 10, 15, 30, 60], [1, 2, 4, 8, 16, 17])
    """
    found = [1]
    for count in range(2, rows + 1):
        if count >= found[-1] * (1.4 if rows % count == 0 else 2) and -(-rows // count) < -(-rows // found[-1]):
            found.append(count)
    return found if found[-1] == rows else [*found, rows]
