"""Writes a timeline as trace events, which Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open."""

import json

from pippy.drivers.plan.cost.simulate import simulate
from pippy.drivers.plan.cost.timeline import Timeline
from pippy.drivers.plan.language.program import Program


def render_trace(drawn: Program | Timeline, unit: float = 1000.0) -> str:
    """The JSON of a timeline, or of a program with a unit cost for each forward and half backward.

    ``unit`` is how many microseconds a unit of the timeline's time lasts: 1000 draws a unit cost as a millisecond;
    pass 1e6 for a recorded run in seconds.

    >>> from pippy.drivers.plan import make_schedule
    >>> trace = json.loads(render_trace(make_schedule("forward_only", workers=1, chunks=1)))
    >>> trace["traceEvents"][1]
    {'ph': 'X', 'name': 'F0.0', 'cat': 'FORWARD', 'pid': 0, 'tid': 0, 'ts': 0.0, 'dur': 1000.0, 'args': {'stage': 0, \
'microbatch': 0}}
    """
    timeline = simulate(drawn).timeline if isinstance(drawn, Program) else drawn
    names: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": worker, "args": {"name": f"worker {worker}"}}
        for worker in range(len(timeline.spans))
    ]
    passes: list[dict[str, object]] = [
        {
            "ph": "X",
            "name": str(span.compute),
            "cat": span.compute.op.name,
            "pid": 0,
            "tid": worker,
            "ts": float(span.start) * unit,
            "dur": float(span.duration) * unit,
            "args": {"stage": span.compute.stage, "microbatch": span.compute.microbatch},
        }
        for worker, spans in enumerate(timeline.spans)
        for span in spans
    ]
    return json.dumps({"traceEvents": names + passes, "displayTimeUnit": "ms"})
