"""Backwards in halves: whether a program has them, and a program with them in place of whole ones."""

from dataclasses import replace

from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.program import Program


def has_halves(program: Program) -> bool:
    """Whether a backward of a program is done in halves.

    >>> from pippy.drivers.plan import make_schedule
    >>> has_halves(make_schedule("1f1b", workers=2, chunks=4)), has_halves(make_schedule("zb_h1", workers=2, chunks=4))
    (False, True)
    """
    return any(each.op == Op.BACKWARD_INPUT for order in program.computations for each in order)


def in_halves(program: Program) -> Program:
    """The same order, with each backward as its two halves, one after the other.

    >>> from pippy.drivers.plan import make_schedule
    >>> print(*in_halves(make_schedule("1f1b", workers=1, chunks=1)).orders[0])
    F0.0 I0.0 W0.0
    """
    return program.with_orders(
        [each for compute in order for each in _halves(compute)] for order in program.computations
    )


def _halves(compute: Compute) -> list[Compute]:
    if compute.op != Op.BACKWARD:
        return [compute]
    return [replace(compute, op=op) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
