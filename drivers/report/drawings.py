"""Draws recorded steps: as SVG, as a timeline on a page that zooms, and as trace events.

The SVG has a row for each worker, with a box for all that it did; below, the prediction to the same scale. Colours are
attributes; a style sheet changes them by class for readers who prefer dark pages. All text goes through ElementTree, which
escapes it.
"""

import json
from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from pippy.drivers.plan.drawings import DARK_FAINT, DARK_GROUND, DARK_INK, FAINT, GROUND, INK, NAMED, in_the_dark
from pippy.drivers.plan.language.instructions import KINDS, Compute, Instruction, Receive, Send
from pippy.drivers.report.activity import Activity, Cause
from pippy.drivers.report.step_data import StepData
from pippy.ir.base.readable import bytes_text, duration

# The colours of what workers do in a step. Passes are bright; idle time is a shade of the page; starting is hatched.


FILLS = {
    **{str(key): kind.colour for key, kind in KINDS.items() if kind.colour},
    Cause.STARTING: "#8d96a1",
    Cause.FILL: "#eceff2",
    Cause.WAITING: "#fad0d0",
    Cause.TRANSFER: "#f5ac3d",
    Cause.SENDING: "#c9683c",
    Cause.ADDING: "#d6487d",
    Cause.PYTHON: "#565b63",
    Cause.DRAIN: "#eceff2",
}
DARK_FILLS = FILLS | {
    Cause.STARTING: "#4f5964",
    Cause.FILL: "#20262c",
    Cause.WAITING: "#5b3038",
    Cause.PYTHON: "#8a919b",
    Cause.DRAIN: "#20262c",
}
HATCHED = Cause.STARTING


def css_class(kind: str) -> str:
    """The class of what has a colour.

    >>> css_class("adding up")
    'k-adding-up'
    """
    return f"k-{kind.replace(' ', '-')}"


def dark_colours() -> str:
    """The style sheet that gives a drawing of a step, and what has the same classes, the colours of dark pages."""
    changed = {kind: colour for kind, colour in DARK_FILLS.items() if colour != FILLS[kind]}
    boxes = {f".step .{css_class(kind)} rect": f"fill: {colour}" for kind, colour in changed.items() if kind != HATCHED}
    swatches = {f"i.{css_class(kind)}": f"background-color: {colour} !important" for kind, colour in changed.items()}
    others = {
        ".step": f"fill: {DARK_INK}",
        ".step .ground": f"fill: {DARK_GROUND}",
        ".step .axis line": f"stroke: {DARK_FAINT}",
        ".step .box text": f"fill: {NAMED}",
        ".step .hatch rect": f"fill: {DARK_FILLS[HATCHED]}",
        ".step .hatch path": f"stroke: {DARK_GROUND}",
    }
    return in_the_dark(others | boxes | swatches)


DRAWING_WIDTH, LEFT, RIGHT, TOP = 1200, 110, 16, 26
ROW_HEIGHT, ROW_GAP = 26, 5
LONGEST_WORKER_NAME = 15  # letters of a worker's name that are shown
NARROWEST_NAMED_BOX = 20  # pixels; a narrower box shows its name in its tooltip only
THINNEST = 0.2  # pixels; thinner boxes are left out, unless they are computations
TICKS = 10
LEGEND = {
    **{str(key): kind.meaning for key, kind in KINDS.items() if kind.meaning},
    Cause.WAITING: "waiting for a value",
    Cause.TRANSFER: "value on its way",
    Cause.SENDING: "sending",
    Cause.ADDING: "adding up gradients",
    Cause.PYTHON: "Python",
    Cause.STARTING: "starting",
    Cause.FILL: "fill, drain",
}


def step_svg(step: StepData) -> str:
    """The drawing, as the text of an SVG file."""
    root = draw(step)
    root.insert(0, Element("rect", {"class": "ground", "width": "100%", "height": "100%", "fill": GROUND}))
    style = Element("style")
    style.text = dark_colours()
    root.insert(0, style)
    return ElementTree.tostring(root, encoding="unicode")


def draw(step: StepData, page: bool = False, number: int = 0) -> Element:
    """The drawing. With ``page``, every box has its times as attributes, for the script that zooms; the drawings of one page
    differ by ``number``."""
    rows = len(step.workers)
    span = max(step.makespan, float(step.predicted.makespan)) or 1.0
    second = TOP + rows * (ROW_HEIGHT + ROW_GAP) + TOP
    bottom = second + rows * (ROW_HEIGHT + ROW_GAP)
    legend = used(step)
    height = bottom + (8 if page else 12 + 18 * (1 + (len(legend) - 1) // 8))
    root = Element(
        "svg",
        {
            **({} if page else {"xmlns": "http://www.w3.org/2000/svg"}),
            "class": "step",
            "viewBox": f"0 0 {DRAWING_WIDTH} {height}",
            "width": str(DRAWING_WIDTH),
            "height": str(height),
            "font-family": "system-ui, sans-serif",
            "font-size": "11",
            "fill": INK,
            "role": "img",
            "aria-label": f"timeline of a step of {duration(step.makespan)} on {rows} workers",
        },
    )
    plot = DRAWING_WIDTH - LEFT - RIGHT
    clip = SubElement(SubElement(root, "clipPath", {"id": f"plot{number}"}), "rect")
    clip.attrib |= {"x": str(LEFT), "y": "0", "width": str(plot), "height": str(bottom)}
    _hatch(root)
    _axis(root, span, bottom)
    _row_names(root, step, TOP, "measured")
    _row_names(root, step, second, "predicted")
    boxes = SubElement(root, "g", {"clip-path": f"url(#plot{number})", "class": "boxes"})
    for worker in range(rows):
        _measured(boxes, step, worker, plot / span, page)
        _predicted(boxes, step, worker, second, plot / span, page)
    if page:
        _arrows(root, step, number)
    else:
        _legend(root, legend, bottom)
    return root


def _arrows(root: Element, step: StepData, number: int) -> None:
    """An arrow from each send to the end of its receive. The script shows them, and places them by their times."""
    head = SubElement(root, "marker", {"id": "head", "viewBox": "0 0 8 8", "refX": "7", "refY": "4", "orient": "auto"})
    SubElement(head, "path", {"d": "M0 0 8 4 0 8z"})
    arrows = SubElement(root, "g", {"class": "arrows", "clip-path": f"url(#plot{number})"})
    for worker, (order, record) in enumerate(zip(step.program.orders, step.records)):
        for receive, end in zip(order, record.ends):
            if isinstance(receive, Receive):
                sent = step.send_times[receive.value, receive.microbatch, worker]
                y1, y2 = (
                    str(TOP + each * (ROW_HEIGHT + ROW_GAP) + ROW_HEIGHT // 2) for each in (receive.source, worker)
                )
                times = {"data-s": f"{sent:.9f}", "data-e": f"{end:.9f}"}
                shape = {"y1": y1, "y2": y2, "marker-end": "url(#head)", "visibility": "hidden"}
                SubElement(arrows, "line", {"data-v": _edge(receive, worker), **times, **shape})


def _edge(instruction: Send | Receive, to: int) -> str:
    """What a send and its receive have in common, and no others."""
    return f"{instruction.value}.{instruction.microbatch}/{to}"


def _hatch(root: Element) -> None:
    """The pattern of what is hatched: stripes of the ground over its colour."""
    shape = {"width": "5", "height": "5", "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    pattern = SubElement(root, "pattern", {"id": "hatch", "class": "hatch", **shape})
    SubElement(pattern, "rect", {"width": "5", "height": "5", "fill": FILLS[HATCHED]})
    SubElement(pattern, "path", {"d": "M0 1h5", "stroke": GROUND, "stroke-width": "2"})


def _fill(kind: str) -> str:
    return "url(#hatch)" if kind == HATCHED else FILLS[kind]


def _row_names(root: Element, step: StepData, top: int, title: str) -> None:
    heading = SubElement(root, "text", {"class": "row", "x": "4", "y": str(top - 8), "font-weight": "bold"})
    heading.text = title
    for worker, name in enumerate(step.workers):
        place = {"class": "row", "x": "4", "y": str(top + worker * (ROW_HEIGHT + ROW_GAP) + 17)}
        SubElement(root, "text", place).text = _short(name, worker)


def _measured(boxes: Element, step: StepData, worker: int, scale: float, page: bool) -> None:
    several = len(step.stages_of(worker)) > 1
    for activity in step.activities[worker]:
        instruction = step.program.orders[worker][activity.at] if activity.at is not None else None
        if page or isinstance(instruction, Compute) or activity.duration * scale >= THINNEST:
            kind = str(instruction.op) if isinstance(instruction, Compute) else activity.cause
            name = _name(instruction, several) if isinstance(instruction, Compute) else ""
            what = kind, name, _title(step, worker, activity, instruction)
            box = _box(boxes, TOP + worker * (ROW_HEIGHT + ROW_GAP), (activity.start, activity.end), scale, what, page)
            if page and isinstance(instruction, Send | Receive):
                box.set("data-v", _edge(instruction, instruction.to if isinstance(instruction, Send) else worker))


def _predicted(boxes: Element, step: StepData, worker: int, top: int, scale: float, page: bool) -> None:
    several = len(step.stages_of(worker)) > 1
    for span in step.predicted.timeline.spans[worker]:
        start, end = float(span.start), float(span.end)
        title = f"{span.compute} as predicted\n{duration(end - start)}, from {duration(start)}"
        what = str(span.compute.op), _name(span.compute, several), title
        _box(boxes, top + worker * (ROW_HEIGHT + ROW_GAP), (start, end), scale, what, page)


def _legend(root: Element, legend: dict[str, str], bottom: int) -> None:
    for index, (kind, words) in enumerate(legend.items()):
        x, y = LEFT + 134 * (index % 8), bottom + 8 + 18 * (index // 8)
        entry = SubElement(root, "g", {"class": css_class(kind)})
        SubElement(entry, "rect", {"x": str(x), "y": str(y), "width": "12", "height": "12", "fill": _fill(kind)})
        SubElement(entry, "text", {"x": str(x + 17), "y": str(y + 10)}).text = words


def used(step: StepData) -> dict[str, str]:
    """The entries of the legend that a step needs."""
    there = {str(each.compute.op) for spans in step.timeline.spans for each in spans}
    there |= {str(each.cause) for worker in step.activities for each in worker}
    if Cause.DRAIN in there:
        there.add(Cause.FILL)
    return {kind: words for kind, words in LEGEND.items() if kind in there}


def _box(
    parent: Element, top: int, times: tuple[float, float], scale: float, what: tuple[str, str, str], page: bool
) -> Element:
    kind, name, title = what
    start, end = times
    x, width = LEFT + start * scale, (end - start) * scale
    group = SubElement(parent, "g", {"class": f"box {css_class(kind)}"})
    if page:
        group.attrib |= {"data-s": f"{start:.9f}", "data-e": f"{end:.9f}"}
    SubElement(group, "title").text = title
    shape = {"x": f"{x:.2f}", "y": str(top), "width": f"{width:.2f}", "height": str(ROW_HEIGHT), "fill": _fill(kind)}
    SubElement(group, "rect", shape)
    if name and (page or width >= NARROWEST_NAMED_BOX):
        place = {"x": f"{x + width / 2:.2f}", "y": str(top + 17), "text-anchor": "middle"}
        if width < NARROWEST_NAMED_BOX:
            place["visibility"] = "hidden"
        SubElement(group, "text", place).text = name
    return group


def _short(name: str, worker: int) -> str:
    """The name of a row, cut to fit in front of it."""
    if name == f"worker{worker}":
        return f"worker {worker}"
    return name if len(name) <= LONGEST_WORKER_NAME else f"{name[: LONGEST_WORKER_NAME - 1]}…"


def _name(compute: Compute, several: bool) -> str:
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


def _axis(root: Element, span: float, bottom: int) -> None:
    axis = SubElement(root, "g", {"class": "axis"})
    scale = (DRAWING_WIDTH - LEFT - RIGHT) / span
    for at in ticks(span):
        x = f"{LEFT + at * scale:.2f}"
        SubElement(axis, "line", {"x1": x, "x2": x, "y1": "14", "y2": str(bottom), "stroke": FAINT})
        SubElement(axis, "text", {"x": x, "y": "10", "text-anchor": "middle"}).text = duration(at)


def ticks(span: float) -> Iterator[float]:
    """Round times from 0 to ``span``: at most about ten.

    >>> [f"{at:g}" for at in ticks(0.05)]
    ['0', '0.005', '0.01', '0.015', '0.02', '0.025', '0.03', '0.035', '0.04', '0.045', '0.05']
    """
    power = 10.0 ** floor(log10(span / TICKS))
    step = next(power * each for each in (1, 2, 5, 10) if span / (power * each) <= TICKS * 1.001)
    count = 0
    while count * step <= span * 1.001:
        yield count * step
        count += 1


# The timeline of a step on a page: the drawing, with what zooms and explains it.


def timeline(step: StepData, span: float = 0.0, number: int = 0) -> str:
    """The HTML of a step's timeline. It shows ``span`` seconds if the step is shorter; ``number`` is its own on the page."""
    drawing = ElementTree.tostring(draw(step, page=True, number=number), encoding="unicode")
    legend = "".join(
        f'<span><i class="swatch {css_class(kind)}" style="background-color:{FILLS[kind]}"></i>{escape(words)}</span>'
        for kind, words in used(step).items()
    )
    span = max(span, step.makespan, float(step.predicted.makespan))
    frame = json.dumps({"left": LEFT, "right": DRAWING_WIDTH - RIGHT, "span": span})
    return (
        '<div class="timeline"><div class="tools"><button data-do="in">zoom in</button><button data-do="out">zoom out</button>'
        '<button data-do="all">all</button>'
        '<button data-do="arrows" aria-pressed="false">arrows of sends</button><span class="hint">'
        "click into it, and the wheel or +/− zooms; drag or arrow keys move; pointing at a box names it; "
        f"its number is {_numbers(step)}</span></div>"
        f'<div class="view" tabindex="0" data-frame=\'{escape(frame)}\'>{drawing}</div>'
        f'<div class="legend">{legend}</div>{_clocks(step)}</div>'
    )


def _numbers(step: StepData) -> str:
    """What the number in a box says."""
    several = any(len(step.stages_of(worker)) > 1 for worker in range(step.program.workers))
    return "its stage and micro-batch" if several else "that of the micro-batch"


def _clocks(step: StepData) -> str:
    wrong = max(step.clock_errors)
    if not wrong:
        return ""
    worker = step.clock_errors.index(wrong)
    return (
        f"<p>The workers are on several hosts. Their clocks were brought together by the values that they sent one another; "
        f"the times of {escape(step.named(worker))} may be off by {duration(wrong)}.</p>"
    )


# Writes recorded steps as trace events, which Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open.
#
# Each worker is a track. An arrow goes from each send to its receive. The predicted computations are a second process.


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
