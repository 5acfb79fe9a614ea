"""Divides the length of a step: what computing took at least, and what was lost, and to what.

    measured step   ├── computing ──┼── schedule ──┼─ uneven stages ─┼── starting, transfer, sending, ... ──┤
                    0               │              │                 └ predicted, as the stages are
                                    │              └ predicted, if all stages took the same time
                                    └ all computations, divided by the workers

The last part is what the step took beyond its prediction. The causes on the critical path say how it is divided. Each loss is a
part of the measured step: whoever ends it saves at most that much.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from pippy.drivers.plan.language.instructions import Add, Compute, Instruction, Receive
from pippy.drivers.plan.language.program import Program
from pippy.drivers.report.activity import Activity, Cause
from pippy.drivers.report.step_data import StepData, evened, predicted

PathActivity = tuple[int, Activity]  # a worker, and what it did


class StepPart(StrEnum):
    """A part of the length of a step: the first is what computing takes, the others are losses.

    >>> StepPart.UNEVEN
    <StepPart.UNEVEN: 'uneven stages'>
    """

    COMPUTING = "computing"
    SCHEDULE = "order of the schedule"
    UNEVEN = "uneven stages"
    STARTING = Cause.STARTING
    TRANSFER = Cause.TRANSFER
    SENDING = Cause.SENDING
    ADDING = Cause.ADDING
    PYTHON = Cause.PYTHON
    SLOWER = "passes slower than their median"


FROM_SCHEDULE = (
    StepPart.COMPUTING,
    StepPart.SCHEDULE,
    StepPart.UNEVEN,
)  # these are in the prediction, and the others are not
ROUNDING = 1e-9  # of a step; smaller parts are none


def step_parts(step: StepData) -> dict[StepPart, float]:
    """The seconds of each part. They add up to the length of the step."""
    medians, program = step.medians, step.program
    usual = [medians[each.op][each.stage] for order in program.computations for each in order]
    foreseen = float(step.predicted.makespan)
    even = min(foreseen, float(predicted(program, evened(medians)).makespan))
    least = min(even, sum(usual) / program.workers)
    parts = {StepPart.COMPUTING: least, StepPart.SCHEDULE: even - least, StepPart.UNEVEN: foreseen - even}
    beyond = step.makespan - foreseen
    on_path = _on_path(step)
    if beyond <= 0 or not on_path:  # some passes were much shorter than their medians
        return {part: seconds * step.makespan / (foreseen or 1.0) for part, seconds in parts.items()}
    scale = beyond / sum(on_path.values())
    return parts | {part: seconds * scale for part, seconds in on_path.items()}


def losses(step: StepData) -> dict[StepPart, float]:
    """The parts that are losses, the largest first."""
    found = {part: seconds for part, seconds in step_parts(step).items() if part != StepPart.COMPUTING and seconds > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _on_path(step: StepData) -> dict[StepPart, float]:
    """The seconds on the critical path that no prediction foresees, by cause."""
    seconds_of: dict[StepPart, float] = {}
    for worker, activity in critical_path(step.program, step.activities):
        instruction = step.program.orders[worker][activity.at] if activity.at is not None else None
        if isinstance(instruction, Compute):
            part, seconds = StepPart.SLOWER, activity.duration - step.medians[instruction.op][instruction.stage]
        elif activity.cause in (Cause.WAITING, Cause.FILL):  # of unknown origin: clocks of several hosts may err
            part, seconds = StepPart.TRANSFER, activity.duration
        else:
            part, seconds = StepPart(activity.cause), activity.duration
        seconds_of[part] = seconds_of.get(part, 0.0) + seconds
    return {part: seconds for part, seconds in seconds_of.items() if seconds > ROUNDING * step.makespan}


# The chain of activities that made a step as long as it was: each of them had to end before the next could begin.
#
# It is found backwards, from the worker that was done last. Where a worker waited for a value, the chain goes on with the
# worker that sent it; where it waited for gradients to add up, with the last worker that brought any:
#
#     worker 0   STARTING │ COMPUTING │ SENDING           COMPUTING │
#                                      ╲                 ╱
#     worker 1                          TRANSFER COMPUTING
#
# So every moment of the step is in one part of the chain, and none of the parts is waiting.


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
