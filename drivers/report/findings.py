"""Describes a recorded step in sentences: the largest loss of time and what helps, the slowest stage, and the prediction."""

from collections.abc import Mapping
from statistics import fmean

from pippy.drivers.report.activity import Cause
from pippy.drivers.report.losses import FROM_SCHEDULE, StepPart, losses
from pippy.drivers.report.step_data import StepData
from pippy.ir.base.readable import duration, listed, percent

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
    totals = [sum(seconds[stage] for seconds in medians.values()) for stage in range(stages)]
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
    for worker in step.activities:
        for each in worker:
            total[each.cause] = total.get(each.cause, 0.0) + each.duration
    available = step.makespan * len(step.activities) or 1.0
    return {cause: seconds / available for cause, seconds in total.items()}
