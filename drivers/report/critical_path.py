"""The chain of activities that made a step as long as it was: each of them had to end before the next could begin.

It is found backwards, from the worker that was done last. Where a worker waited for a value, the chain goes on with the worker
that sent it; where it waited for gradients to add up, with the last worker that brought any:

    worker 0   STARTING │ COMPUTING │ SENDING           COMPUTING │
                                     ╲                 ╱
    worker 1                          TRANSFER COMPUTING

So every moment of the step is in one part of the chain, and none of the parts is waiting.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from pippy.drivers.plan.language.instructions import Add, Instruction, Receive
from pippy.drivers.plan.language.program import Program
from pippy.drivers.report.activity import Activity, Cause

PathActivity = tuple[int, Activity]  # a worker, and what it did


def critical_path(program: Program, activities: Sequence[Sequence[Activity]]) -> list[PathActivity]:
    """The chain, from the beginning of the step to its end, without a gap.

    >>> from pippy.drivers.plan import make_schedule
    >>> alone = [[Activity(Cause.STARTING, 0.0, 1.0), Activity(Cause.COMPUTING, 1.0, 3.0, at=0)]]
    >>> [str(each.cause) for _, each in critical_path(make_schedule("1f1b", workers=1, chunks=1), alone)]
    ['starting', 'computing']
    """
    busy = [[each for each in worker if each.cause != Cause.DRAIN] for worker in activities]
    ends = [[each.end for each in worker] for worker in busy]
    worker = max(range(len(ends)), key=lambda each: ends[each][-1:])
    time = ends[worker][-1] if ends[worker] else 0.0
    adds = _add_together(program)
    path: list[PathActivity] = []
    left: set[tuple[int, int]] = (
        set()
    )  # waits that were followed: clocks of several hosts may err, and lead in a circle
    while time > 0 and (at := bisect_left(ends[worker], time)) < len(ends[worker]):
        activity = busy[worker][at]
        instruction = None if activity.at is None else program.orders[worker][activity.at]
        begin, source = max(activity.start, 0.0), None
        if activity.cause in (Cause.WAITING, Cause.FILL) and (worker, at) not in left:
            left.add((worker, at))
            source = instruction.source if isinstance(instruction, Receive) else None
            begin = time
        elif activity.cause == Cause.ADDING and not isinstance(instruction, Add):
            others = {other: _began_to_add(program.orders[other], busy[other]) for other in adds[worker] - {worker}}
            last = max(others, key=lambda other: others[other], default=worker)
            if activity.start < others.get(last, 0.0) < time:
                source, begin = last, others[last]
        if begin < time:
            path.append((worker, replace(activity, start=begin, end=time)))
        time = begin
        worker = worker if source is None else source
    return path[::-1]


def _add_together(program: Program) -> list[set[int]]:
    """For each worker, those with copies of the parameters that it has a copy of."""
    groups = [copies.stages for copies in program.replicated]
    if program.replicas > 1:
        groups += [(stage,) for stage in program.backward]
    together: list[set[int]] = [set() for _ in range(program.workers)]
    for stages in groups:
        holders = {worker for stage in stages for worker in program.workers_of(stage)}
        for worker in holders:
            together[worker] |= holders
    return together


def _began_to_add(order: Sequence[Instruction], activities: Sequence[Activity]) -> float:
    """When a worker began to add up the gradients of copies."""
    adding = (each for each in activities if each.cause == Cause.ADDING)
    return next((each.start for each in adding if each.at is None or not isinstance(order[each.at], Add)), 0.0)
