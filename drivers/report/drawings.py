"""Draws recorded steps: as SVG, as a timeline on a page that zooms, and as trace events.

The SVG has a row for each worker, with a box for all that it did; below, the prediction to the same scale. Passes are bright;
idle time is a shade of the page; starting is hatched.
"""

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from pippy.drivers.plan.drawings import (
    DARK,
    DARK_GROUND,
    GAP,
    GROUND,
    LEFT,
    RIGHT,
    ROW,
    TOP,
    WIDTH,
    DrawnTime,
    TraceEvent,
    draw,
    in_the_dark,
    pass_slices,
    svg_file,
    trace_file,
    trace_part,
    track_names,
)
from pippy.drivers.plan.language.instructions import KINDS, Compute, Instruction, Receive, Send
from pippy.drivers.report.activity import Activity, Cause
from pippy.drivers.report.step_data import StepData
from pippy.ir.base.readable import bytes_text, duration

_CAUSES = {  # the colour, that on dark pages, and what a legend says
    Cause.WAITING: ("#fad0d0", "#5b3038", "waiting for a value"),
    Cause.TRANSFER: ("#f5ac3d", "#f5ac3d", "value on its way"),
    Cause.SENDING: ("#c9683c", "#c9683c", "sending"),
    Cause.ADDING: ("#d6487d", "#d6487d", "adding up gradients"),
    Cause.PYTHON: ("#565b63", "#8a919b", "Python"),
    Cause.STARTING: ("#8d96a1", "#4f5964", "starting"),
    Cause.FILL: ("#eceff2", "#20262c", "fill, drain"),
    Cause.DRAIN: ("#eceff2", "#20262c", ""),
}
_PASSES = {str(key): (kind.colour, kind.colour, kind.meaning) for key, kind in KINDS.items() if kind.colour}
FILLS = {kind: light for kind, (light, _, _) in (_PASSES | _CAUSES).items()}
DARK_FILLS = {kind: dark for kind, (_, dark, _) in (_PASSES | _CAUSES).items()}
LEGEND = {kind: words for kind, (_, _, words) in (_PASSES | _CAUSES).items() if words}
HATCHED = Cause.STARTING
LONGEST_WORKER_NAME = 15  # letters of a worker's name that are shown


def css_class(kind: str) -> str:
    """The class of what has a colour.

    >>> css_class("adding up")
    'k-adding-up'
    """
    return f"k-{kind.replace(' ', '-')}"


def dark_rules() -> dict[str, str]:
    """The colours of dark pages, for a picture of a step."""
    changed = {kind: colour for kind, colour in DARK_FILLS.items() if colour != FILLS[kind] and kind != HATCHED}
    boxes = {f".pippy-timeline .{css_class(kind)} rect": f"fill: {colour}" for kind, colour in changed.items()}
    hatch = {"rect": f"fill: {DARK_FILLS[HATCHED]}", "path": f"stroke: {DARK_GROUND}"}
    return DARK | boxes | {f".pippy-timeline .hatch {shape}": rule for shape, rule in hatch.items()}


def dark_colours() -> str:
    """The style sheet that gives a page with timelines, and what has the same classes, the colours of dark pages."""
    swatches = {f"i.{css_class(kind)}": f"background-color: {dark} !important" for kind, dark in DARK_FILLS.items()}
    return in_the_dark(dark_rules() | swatches)


def step_svg(step: StepData) -> str:
    """The drawing, as the text of an SVG file."""
    root, legend = drawn(step, step_span(step)), used(step)
    bottom = int(root.attrib["height"])
    height = str(bottom + 4 + 18 * (1 + (len(legend) - 1) // 8))
    root.attrib |= {"viewBox": f"0 0 {WIDTH} {height}", "height": height}
    for index, (kind, words) in enumerate(legend.items()):
        x, y = LEFT + 134 * (index % 8), bottom + 18 * (index // 8)
        entry = SubElement(root, "g", {"class": css_class(kind)})
        SubElement(entry, "rect", {"x": str(x), "y": str(y), "width": "12", "height": "12", "fill": _fill(kind)})
        SubElement(entry, "text", {"x": str(x + 17), "y": str(y + 10)}).text = words
    return svg_file(root, dark_rules())


def step_span(step: StepData) -> float:
    """How many seconds a drawing of a step has: until the step ends, and its prediction."""
    return max(step.makespan, float(step.predicted.makespan)) or 1.0


def drawn(step: StepData, span: float, number: int = 0) -> Element:
    """The drawing of a step, of so many seconds, with ``number`` on a page."""
    workers = range(len(step.workers))
    names = [_short(name, worker) for worker, name in enumerate(step.workers)]
    measured, predicted = [_measured(step, each) for each in workers], [_predicted(step, each) for each in workers]
    parts = {"measured": [*zip(names, measured)], "predicted": [*zip(names, predicted)]}
    label = f"timeline of a step of {duration(step.makespan)} on {len(names)} workers"
    root = draw(parts, span, duration, label, number)
    shape = {"width": "5", "height": "5", "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    pattern = SubElement(root, "pattern", {"id": "hatch", "class": "hatch", **shape})
    SubElement(pattern, "rect", {"width": "5", "height": "5", "fill": FILLS[HATCHED]})
    SubElement(pattern, "path", {"d": "M0 1h5", "stroke": GROUND, "stroke-width": "2"})
    return root


def _measured(step: StepData, worker: int) -> Iterator[DrawnTime]:
    for activity in step.activities[worker]:
        instruction = step.program.orders[worker][activity.at] if activity.at is not None else None
        kind, name, edge = str(activity.cause), "", ""
        if isinstance(instruction, Compute):
            kind, name = str(instruction.op), _name(step, worker, instruction)
        elif isinstance(instruction, Send | Receive):
            edge = _edge(instruction, instruction.to if isinstance(instruction, Send) else worker)
        title = _title(step, worker, activity, instruction)
        yield DrawnTime(activity.start, activity.end, name, title, _fill(kind), css_class(kind), edge=edge)


def _predicted(step: StepData, worker: int) -> Iterator[DrawnTime]:
    for span in step.predicted.timeline.spans[worker]:
        start, end, kind = float(span.start), float(span.end), str(span.compute.op)
        title = f"{span.compute} as predicted\n{duration(end - start)}, from {duration(start)}"
        yield DrawnTime(start, end, _name(step, worker, span.compute), title, FILLS[kind], css_class(kind))


def _edge(instruction: Send | Receive, to: int) -> str:
    """What a send and its receive have in common, and no others."""
    return f"{instruction.value}.{instruction.microbatch}/{to}"


def _fill(kind: str) -> str:
    return "url(#hatch)" if kind == HATCHED else FILLS[kind]


def _short(name: str, worker: int) -> str:
    """The name of a row, cut to fit in front of it."""
    if name == f"worker{worker}":
        return f"worker {worker}"
    return name if len(name) <= LONGEST_WORKER_NAME else f"{name[: LONGEST_WORKER_NAME - 1]}…"


def _name(step: StepData, worker: int, compute: Compute) -> str:
    several = len(step.stages_of(worker)) > 1
    return f"{compute.stage}.{compute.microbatch}" if several else str(compute.microbatch)


def _title(step: StepData, worker: int, each: Activity, instruction: Instruction | None) -> str:
    lines = [str(instruction) if isinstance(instruction, Compute) else each.label]
    if isinstance(instruction, Compute):
        what = f"{LEGEND[str(instruction.op)]} of {step.model.stage(instruction.stage)}"
        lines.append(f"{what}, micro-batch {instruction.microbatch}")
    elif instruction is not None:
        lines.append(str(instruction))
    if isinstance(instruction, Send | Receive):
        lines.append(step.model.value(instruction.value))
    if isinstance(instruction, Send) and each.at is not None:
        lines.append(bytes_text(step.noted[worker].sizes[each.at]))
    return "\n".join([*lines, f"{duration(each.duration)}, from {duration(each.start)}"])


def used(step: StepData) -> dict[str, str]:
    """The entries of the legend that a step needs."""
    there = {str(each.compute.op) for spans in step.timeline.spans for each in spans}
    there |= {str(each.cause) for worker in step.activities for each in worker}
    if Cause.DRAIN in there:
        there.add(Cause.FILL)
    return {kind: words for kind, words in LEGEND.items() if kind in there}


# The timeline of a step on a page: the drawing, with what zooms and explains it.


def timeline(step: StepData, span: float = 0.0, number: int = 0) -> str:
    """The HTML of a step's timeline. It shows ``span`` seconds if the step is shorter; ``number`` is its own on the page."""
    root = drawn(step, step_span(step), number)
    _arrows(root, step, number)
    legend = "".join(
        f'<span><i class="swatch {css_class(kind)}" style="background-color:{FILLS[kind]}"></i>{escape(words)}</span>'
        for kind, words in used(step).items()
    )
    frame = json.dumps({"left": LEFT, "right": WIDTH - RIGHT, "span": max(span, step_span(step))})
    several = any(len(step.stages_of(worker)) > 1 for worker in range(step.program.workers))
    numbers = "its stage and micro-batch" if several else "that of the micro-batch"
    return (
        '<div class="timeline"><div class="tools"><button data-do="in">zoom in</button><button data-do="out">zoom out</button>'
        '<button data-do="all">all</button>'
        '<button data-do="arrows" aria-pressed="false">arrows of sends</button><span class="hint">'
        "click into it, and the wheel or +/− zooms; drag or arrow keys move; pointing at a box names it; "
        f"its number is {numbers}</span></div>"
        f'<div class="view" tabindex="0" data-frame=\'{escape(frame)}\'>{ElementTree.tostring(root, encoding="unicode")}</div>'
        f'<div class="legend">{legend}</div>{_clocks(step)}</div>'
    )


def _arrows(root: Element, step: StepData, number: int) -> None:
    """An arrow from each send to the end of its receive. The script shows them, and places them by their times."""
    head = SubElement(root, "marker", {"id": "head", "viewBox": "0 0 8 8", "refX": "7", "refY": "4", "orient": "auto"})
    SubElement(head, "path", {"d": "M0 0 8 4 0 8z"})
    arrows = SubElement(root, "g", {"class": "arrows", "clip-path": f"url(#plot{number})"})
    for worker, (order, record) in enumerate(zip(step.program.orders, step.records)):
        for receive, end in zip(order, record.ends):
            if isinstance(receive, Receive):
                sent = step.send_times[receive.value, receive.microbatch, worker]
                y1, y2 = (str(TOP + each * (ROW + GAP) + ROW // 2) for each in (receive.source, worker))
                times = {"data-s": f"{sent:.9f}", "data-e": f"{end:.9f}"}
                shape = {"y1": y1, "y2": y2, "marker-end": "url(#head)", "visibility": "hidden"}
                SubElement(arrows, "line", {"data-v": _edge(receive, worker), **times, **shape})


def _clocks(step: StepData) -> str:
    wrong = max(step.clock_errors)
    if not wrong:
        return ""
    worker = step.clock_errors.index(wrong)
    return (
        f"<p>The workers are on several hosts. Their clocks were brought together by the values that they sent one another; "
        f"the times of {escape(step.named(worker))} may be off by {duration(wrong)}.</p>"
    )


# Recorded steps as trace events. An arrow goes from each send to its receive. The predicted computations are a second process.


MEASURED, PREDICTED = 0, 1


def perfetto_trace(steps: Sequence[StepData]) -> str:
    """The JSON of some steps, in the order in which they ran."""
    given = enumerate(steps[0].workers)
    names = [f"worker {at}" if name == f"worker{at}" else f"worker {at}: {name}" for at, name in given]
    events = [*track_names(MEASURED, "measured", names), *track_names(PREDICTED, "predicted", names)]
    free = 0.0  # when the predictions of earlier steps end: they must not overlap on a track
    for number, step in enumerate(steps):
        shift = step.begin - steps[0].begin
        free = max(shift, free)
        events += [*_activities(step, shift), *_flows(step, shift, number)]
        events += pass_slices(PREDICTED, step.predicted.timeline, shift=free)
        free += float(step.predicted.makespan)
    return trace_file(events)


def _activities(step: StepData, shift: float) -> Iterator[TraceEvent]:
    for worker, (order, record) in enumerate(zip(step.program.orders, step.records)):
        for activity in step.activities[worker]:
            if activity.cause in (Cause.STARTING, Cause.DRAIN) and activity.at is None:
                continue  # nothing is done
            instruction = order[activity.at] if activity.at is not None else None
            args: dict[str, Any] = {} if instruction is None else {"instruction": str(instruction)}
            if isinstance(instruction, Compute):
                args |= {"stage": instruction.stage, "microbatch": instruction.microbatch}
            elif isinstance(instruction, Send) and activity.at is not None:
                args |= {"bytes": record.sizes[activity.at]}
            name = str(instruction) if isinstance(instruction, Compute) else activity.label
            times = activity.start + shift, activity.end + shift
            yield trace_part((MEASURED, worker), name, activity.cause.name, times, args)


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
