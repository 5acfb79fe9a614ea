"""Describes a recorded step in sentences: the slowest stage, where the time went, and what helps."""

from statistics import fmean

from pippy.drivers.recording.activity import Cause
from pippy.drivers.recording.prediction import evened, predicted
from pippy.drivers.recording.step_data import StepData
from pippy.drivers.recording.units import duration, percent

WORTH_IT = 0.03  # layers are worth moving if even stages would shorten the step by this share
CROWDED = 0.1  # the cores are crowded if workers that have work get no core for this share of the time
ADVICE = {
    Cause.FILL: "a pipeline fills once a step: more micro-batches, or several stages on each worker (an interleaved "
    "schedule), make that a smaller share",
    Cause.DRAIN: "a pipeline drains once a step: more micro-batches, or a zero-bubble schedule, make that a smaller share",
    Cause.WAITING: "values were not made yet when they were wanted: stages that take equally long, more micro-batches, or "
    "another schedule (zb_h1, zb_v) leave less of that",
    Cause.TRANSFER: "values were on their way: cut the model where less passes (bytes per edge, below), take larger "
    "micro-batches, so that there are fewer messages, or the schedule eager_1f1b, which does other forwards meanwhile",
    Cause.SENDING: "handing over values keeps the sender busy: cut the model where less passes (bytes per edge, below)",
    Cause.ADDING: "the gradients of replicated parameters are added up at the end: fewer of them, or TRANSMIT, take less",
    Cause.STARTING: "the step had yet to reach the workers: fewer and larger steps, or run_async, hide that",
    Cause.PYTHON: "between the instructions: larger micro-batches make that a smaller share",
}


def findings(step: StepData) -> list[str]:
    """Sentences about a step, the slowest stage first."""
    crowded = off_cores(step)
    found = [slowest(step), where_time_went(step), beside_prediction(step)]
    if crowded > CROWDED:
        found.append(
            f"For {percent(crowded)} or more of the time in which workers had work, they had no core to do it on, or slept: "
            "other workers or processes take the cores, and all times are longer for it. Start as many workers as there are "
            "cores for, with threads= and pin= so that they do not share any."
        )
    return found


def slowest(step: StepData) -> str:
    """Says which stage is the slowest, and what even stages would gain."""
    medians, stages = step.medians, step.program.stages
    totals = [sum(seconds[stage] for seconds in medians.values()) for stage in range(stages)]
    slow = max(range(stages), key=totals.__getitem__)
    worker = step.program.placement.worker_of[slow]
    passes = " + ".join(f"{op} {duration(seconds[slow])}" for op, seconds in medians.items() if seconds[slow])
    named = (
        f"Stage {slow} on {step.named(worker)} is the slowest: {duration(totals[slow])} for a micro-batch ({passes})"
    )
    if stages == 1:
        return f"There is one stage, on {step.named(worker)}: {duration(totals[0])} for a micro-batch ({passes})."
    now, even = float(step.predicted.makespan), float(predicted(step.program, evened(medians)).makespan)
    quick = min(range(stages), key=totals.__getitem__)
    named += f"; the stages take {duration(fmean(totals))} on average."
    if now - even < WORTH_IT * now:
        return f"{named} They are even enough: if all took the same, the step would be {percent((now - even) / now)} shorter."
    return (
        f"{named} Move layers from it to others; stage {quick} is the quickest, with {duration(totals[quick])}. If all took "
        f"the same, the step would take {duration(even)} in place of {duration(now)}, by the simulation."
    )


def where_time_went(step: StepData) -> str:
    """Says how much of the workers' time was computing, which cause took most of the rest, and what helps."""
    shares = cause_shares(step)
    text = f"{percent(shares.pop(Cause.COMPUTING, 0.0))} of the workers' time was computing."
    if not shares:
        return text
    cause = max(shares, key=shares.__getitem__)
    return f"{text} The largest part of the rest, {percent(shares[cause])}, was {cause}: {ADVICE[cause]}."


def beside_prediction(step: StepData) -> str:
    """Says how long the step took, and how long it would have taken with nothing but its computations."""
    now, least = step.makespan, float(step.predicted.makespan)
    if not least:
        return f"The step took {duration(now)}."
    return (
        f"The step took {duration(now)}. By the schedule, with computations as long as they were in the median, and nothing "
        f"else that takes time, it would have taken {duration(least)}."
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
    whole = step.makespan * len(step.activities) or 1.0
    return {cause: seconds / whole for cause, seconds in total.items()}
