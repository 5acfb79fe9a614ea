"""Divides the length of a step: what computing took at least, and what was lost, and to what.

    measured step   ├── computing ──┼── schedule ──┼─ uneven stages ─┼── starting, transfer, sending, ... ──┤
                    0               │              │                 └ predicted, as the stages are
                                    │              └ predicted, if all stages took the same time
                                    └ all computations, divided by the workers

The last part is what the step took beyond its prediction. The causes on the critical path say how it is divided. Each loss is a
part of the measured step: whoever ends it saves at most that much.
"""

from enum import StrEnum

from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.report.activity import Cause
from pippy.drivers.report.critical_path import critical_path
from pippy.drivers.report.prediction import evened, predicted
from pippy.drivers.report.step_data import StepData


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
