"""Divides the length of a step: what computing took at least, and what was lost, and to what.

    measured step   ├── computing ──┼── schedule ──┼─ uneven stages ─┼── starting, transfer, sending, ... ──┤
                    0               │              │                 └ predicted, as the stages are
                                    │              └ predicted, if all stages took the same time
                                    └ all computations, divided by the workers

The last part is what the step took beyond its prediction. The causes on the critical path say how it is divided. Each loss is a
part of the measured step: whoever ends it saves at most that much.

Sentences describe a recorded step: the largest loss of time and what helps, the slowest stage, and the prediction.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from statistics import fmean

from pippy.drivers.plan.language.instructions import Add, Compute, Instruction, Receive
from pippy.drivers.plan.language.program import Program
from pippy.drivers.report.activity import Activity, Cause, spent
from pippy.drivers.report.step_data import StepData, evened, predicted
from pippy.ir.base.readable import duration, listed, percent

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


WORTH_IT = 0.03  # a loss is worth a remedy if it takes this share of the step
CROWDED = 0.1  # the cores are crowded if workers that have work get no core for this share of the time
ADVICE = {
    StepPart.SCHEDULE: "Workers fill, drain and wait for one another, even if all stages take the same time. {} make that a "
    "smaller share",
    StepPart.TRANSFER: "Values were on their way. Cut the model where less passes (see the bytes below), take larger "
    "micro-batches, so that there are fewer messages, or the schedule eager_1f1b, which does other forwards meanwhile",
    StepPart.SENDING: "Handing over values keeps the sender busy. Cut the model where less passes (see the bytes below)",
    StepPart.ADDING: "Gradients are added up: of replicated parameters, at the end, and of values that several stages read. "
    "Fewer of them, or TRANSMIT, take less",
    StepPart.STARTING: "The step had yet to reach the workers. Fewer and larger steps, or run_async, hide that",
    StepPart.PYTHON: "It passes between the instructions. Larger micro-batches make that a smaller share",
    StepPart.SLOWER: "Passes that others wait for took longer than the same passes of other micro-batches. Micro-batches of "
    "unequal size, other processes or a busy device do that",
}


def findings(step: StepData) -> list[str]:
    """Sentences about a step, the largest loss of time first."""
    crowded, lost = off_cores(step) > CROWDED, losses(step)
    lead = largest_loss(step, lost, crowded)
    sentences = [lead]
    if crowded:
        sentences.append(
            f"For {percent(off_cores(step))} or more of the time in which workers had work, they had no core to do it on, or "
            "slept: other workers or processes take the cores, and all times are longer for it. Start as many workers as "
            "there are cores for, with threads= and pin= so that they do not share any."
        )
    stage = slowest(step, lost.get(StepPart.UNEVEN, 0.0))
    return [*sentences, *([] if stage in lead else [stage]), where_time_went(step)]


def largest_loss(step: StepData, lost_seconds: Mapping[StepPart, float], crowded: bool) -> str:
    """Says which of the losses is the largest, and what helps. Its time is a part of the measured step."""
    length = step.makespan
    if crowded:  # then one cannot say which of the causes would be there otherwise
        beyond = sum(seconds for part, seconds in lost_seconds.items() if part not in FROM_SCHEDULE)
        within = max((seconds for part, seconds in lost_seconds.items() if part in FROM_SCHEDULE), default=0.0)
        if beyond > max(within, WORTH_IT * length):
            return (
                f"The largest loss is outside the computations: {_of(beyond, step)} was beyond what the schedule and the "
                "computations need, while workers had no core."
            )
    part = next(iter(lost_seconds), StepPart.COMPUTING)
    if lost_seconds.get(part, 0.0) < WORTH_IT * length:
        share = percent(1 - sum(lost_seconds.values()) / (length or 1.0))
        return f"No large loss: {share} of the step of {duration(length)} was computing."
    lost = f"The largest loss is {_part_name(part)}: {_of(lost_seconds[part], step)}."
    if part == StepPart.UNEVEN:
        return f"{lost} {slowest(step, lost_seconds[part])}"
    return f"{lost} {ADVICE[part].format(_fills_better(step))}."


def _part_name(part: StepPart) -> str:
    return {StepPart.SCHEDULE: "the order of the schedule", StepPart.STARTING: "starting the step"}.get(part, str(part))


def _of(seconds: float, step: StepData) -> str:
    return f"{duration(seconds)} of the {duration(step.makespan)} of the step ({percent(seconds / (step.makespan or 1.0))})"


def _fills_better(step: StepData) -> str:
    """What leaves workers less idle than the schedule of the step."""
    program, better = step.program, ["More micro-batches"]
    if program.backward and not program.schedule.startswith("zb"):
        better.append("a zero-bubble schedule (zb_h1, zb_v)")
    if program.backward and program.stages == program.workers:
        better.append("several stages on each worker (interleaved_1f1b)")
    return listed(better, "or")


def slowest(step: StepData, uneven: float) -> str:
    """Says which stage is the slowest, and that even stages would shorten the measured step by ``uneven`` seconds."""
    medians, stages = step.medians, step.program.stages
    totals = step.stage_seconds
    slow = max(range(stages), key=totals.__getitem__)
    where = step.holders(slow)
    passes = " + ".join(f"{op} {duration(seconds[slow])}" for op, seconds in medians.items() if seconds[slow])
    took = f"{duration(totals[slow])} for a micro-batch ({passes})"
    if stages == 1:
        return f"There is one stage, on {where}: {took}."
    name = step.model.stage(slow).replace("stage", "Stage", 1)
    named = f"{name} on {where} is the slowest: {took}; the stages take {duration(fmean(totals))} on average."
    if uneven < WORTH_IT * step.makespan:
        return (
            f"{named} They are even enough: if all took the same, the step would be at most "
            f"{percent(uneven / (step.makespan or 1.0))} shorter."
        )
    quick = min(range(stages), key=totals.__getitem__)
    return (
        f"{named} Move layers from it to others; {step.model.stage(quick)} is the quickest, with {duration(totals[quick])}. "
        f"If all took the same, the step would take about {duration(step.makespan - uneven)} in place of "
        f"{duration(step.makespan)}."
    )


def where_time_went(step: StepData) -> str:
    """Says how much of the workers' time was computing, and how long the step would have taken with nothing else."""
    shares = cause_shares(step)
    text = f"{percent(shares.pop(Cause.COMPUTING, 0.0))} of the workers' time was computing"
    cause = max(shares, key=shares.__getitem__, default=None)
    text += f", and {percent(shares[cause])} {cause}." if cause is not None else "."
    least = float(step.predicted.makespan)
    if not least:
        return text
    return (
        f"{text} The step took {duration(step.makespan)}. By the schedule, with computations as long as they were in the "
        f"median, and nothing else that takes time, it would have taken {duration(least)}."
    )


def off_cores(step: StepData) -> float:
    """The share of the time, at least, in which workers had work but no core. It is 0 with accelerators."""
    busy = cpu = 0.0
    for activities, noted in zip(step.activities, step.noted):
        if noted.cpu is not None:
            work = (Cause.COMPUTING, Cause.SENDING, Cause.PYTHON)
            worked = sum(each.duration for each in activities if each.cause in work)
            busy, cpu = busy + worked, cpu + min(worked, noted.cpu)
    return 1 - cpu / busy if busy else 0.0


def cause_shares(step: StepData) -> dict[Cause, float]:
    """The share of all workers' time that each cause took."""
    total: dict[Cause, float] = {}
    for (cause, _), seconds in spent([each for worker in step.activities for each in worker]).items():
        total[cause] = total.get(cause, 0.0) + seconds
    available = step.makespan * len(step.activities) or 1.0
    return {cause: seconds / available for cause, seconds in total.items()}
