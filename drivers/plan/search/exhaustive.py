"""Tries all orders that could be better than the best known one. This is for tiny programs only.

Each schedule is written in one way: its passes in the order of their starts, and each starts as early as it can. A beginning is
dropped as soon as no continuation can beat the best known makespan (branch and bound).
"""

from collections.abc import Sequence

from pippy.drivers.plan.cost.costs import Number
from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.search.partial_schedule import PartialSchedule, SearchProblem

Orders = Sequence[Sequence[Compute]]


def search_all(problem: SearchProblem, makespan: Number, orders: Orders) -> tuple[Number, Orders]:
    """The shortest makespan, and orders that have it. If none is shorter than that of the given orders, those are returned.

    >>> from pippy.drivers.plan import Costs, make_schedule
    >>> program = make_schedule("fill_drain", workers=1, chunks=2)
    >>> search_all(SearchProblem(program, Costs(), memory=[1], halves=False), 99.0, [])[0]
    6.0
    """
    beginnings: list[tuple[Number, PartialSchedule]] = [(0, PartialSchedule(problem))]
    while beginnings:
        latest, partial = beginnings.pop()
        if partial.bound >= makespan:
            continue
        if partial.complete:
            makespan, orders = partial.bound, partial.orders
            continue
        for worker in range(partial.workers):
            for start, compute in partial.options(worker):
                if start >= latest:
                    further = partial.copy()
                    further.add(worker, compute, start)
                    beginnings.append((start, further))
    return makespan, orders
