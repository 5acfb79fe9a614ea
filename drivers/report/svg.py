"""Draws a recorded step as SVG: a row for each worker, with a box for all that it did; below, the prediction to the same scale.

Colours are attributes; a style sheet changes them by class for readers who prefer dark pages. All text goes through
ElementTree, which escapes it.
"""

from collections.abc import Iterator
from math import floor, log10
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from pippy.drivers.plan.drawings.colours import FAINT, GROUND, INK
from pippy.drivers.plan.language.instructions import KINDS, Compute, Instruction, Receive, Send
from pippy.drivers.report.activity import Activity, Cause
from pippy.drivers.report.colours import FILLS, HATCHED, css_class, dark_colours
from pippy.drivers.report.step_data import StepData
from pippy.ir.base.readable import bytes_text, duration

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
