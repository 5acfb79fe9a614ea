"""Writes recorded steps as trace events, which Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open.

Each worker is a track. An arrow goes from each send to its receive. The predicted computations are a second process.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pippy.drivers.plan.language.instructions import Compute, Receive, Send
from pippy.drivers.report.activity import Cause
from pippy.drivers.report.step_data import StepData

MEASURED, PREDICTED = 0, 1
TraceEvent = dict[str, Any]


def perfetto_trace(steps: Sequence[StepData]) -> str:
    """The JSON of some steps, in the order in which they ran."""
    events = [*_metadata(MEASURED, "measured", steps[0].workers), *_metadata(PREDICTED, "predicted", steps[0].workers)]
    free = 0.0  # when the predictions of earlier steps end: they must not overlap on a track
    for number, step in enumerate(steps):
        shift = step.begin - steps[0].begin
        events += [*_activities(step, shift), *_flows(step, shift, number), *_prediction(step, max(shift, free))]
        free = max(shift, free) + float(step.predicted.makespan)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _metadata(process: int, name: str, workers: Sequence[str]) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for worker, its_name in enumerate(workers):
        names = {"name": f"worker {worker}" if its_name == f"worker{worker}" else f"worker {worker}: {its_name}"}
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": worker, "args": names}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": worker, "args": {"sort_index": worker}}


def _slice(
    process: int, worker: int, name: str, category: str, start: float, end: float, args: TraceEvent
) -> TraceEvent:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": worker, **times, "args": args}


def _activities(step: StepData, shift: float) -> Iterator[TraceEvent]:
    for worker, (order, record) in enumerate(zip(step.program.orders, step.records)):
        for activity in step.activities[worker]:
            if activity.cause in (Cause.STARTING, Cause.DRAIN) and activity.at is None:
                continue  # nothing is done
            instruction = order[activity.at] if activity.at is not None else None
            args: TraceEvent = {} if instruction is None else {"instruction": str(instruction)}
            if isinstance(instruction, Compute):
                args |= {"stage": instruction.stage, "microbatch": instruction.microbatch}
            elif isinstance(instruction, Send) and activity.at is not None:
                args |= {"bytes": record.sizes[activity.at]}
            name = str(instruction) if isinstance(instruction, Compute) else activity.label
            times = activity.start + shift, activity.end + shift
            yield _slice(MEASURED, worker, name, activity.cause.name, *times, args)


def _flows(step: StepData, shift: float, number: int) -> Iterator[TraceEvent]:
    """The arrows: each begins with its send, and ends in the last part of its receive."""
    for worker, parts in enumerate(step.activities):
        for activity in parts:
            receive = step.program.orders[worker][activity.at] if activity.at is not None else None
            if isinstance(receive, Receive) and activity.cause == Cause.TRANSFER:
                sent = step.send_times[receive.value, receive.microbatch, worker]
                middle = (activity.start + activity.end) / 2
                name = f"{receive.value}.{receive.microbatch}"
                arrow = {"name": name, "cat": "value", "id": f"{number}/{name}/{worker}", "pid": MEASURED}
                yield {"ph": "s", **arrow, "tid": receive.source, "ts": (sent + shift) * 1e6}
                yield {"ph": "f", "bp": "e", **arrow, "tid": worker, "ts": (middle + shift) * 1e6}


def _prediction(step: StepData, shift: float) -> Iterator[TraceEvent]:
    for worker, spans in enumerate(step.predicted.timeline.spans):
        for span in spans:
            args = {"stage": span.compute.stage, "microbatch": span.compute.microbatch}
            times = float(span.start) + shift, float(span.end) + shift
            yield _slice(PREDICTED, worker, str(span.compute), "PREDICTED", *times, args)
