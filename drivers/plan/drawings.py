"""How a timeline is shown: as a grid of text, as a picture, and as trace events.

In the grid, as papers draw schedules, a line is a worker, and time runs to the right in steps of one column. A pass begins with
its name (``F3`` or, if its worker holds several stages, ``F5.3``: stage 5, micro-batch 3) and goes on with dashes; dots are
idle. What takes no time is left out.

In the picture a row is a worker and a box a pass, coloured by kind, shaded by stage. Recorded steps are drawn in the same way.
Colours are attributes; a style sheet changes them by class for readers who prefer dark pages. ElementTree escapes all text.
Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open the trace events.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, gcd, lcm, log10
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from pippy.drivers.plan.cost.simulate import Simulation, Span, Timeline, simulate
from pippy.drivers.plan.language.errors import ArgumentError, ProgramError, beginning
from pippy.drivers.plan.language.program import Drawn, Program

NAMED = "#10151b"  # what is written in a pass
INK, FAINT, GROUND = "#1f2328", "#d0d7de", "#ffffff"
DARK_INK, DARK_FAINT, DARK_GROUND = "#e6edf3", "#30363d", "#0d1117"


def in_the_dark(rules: Mapping[str, str]) -> str:
    """A style sheet for readers who prefer dark pages, from selectors and what holds for them.

    >>> in_the_dark({".ground": f"fill: {DARK_GROUND}"})
    '@media (prefers-color-scheme: dark) { .ground { fill: #0d1117 } }'
    """
    return f"@media (prefers-color-scheme: dark) {{ {' '.join(f'{each} {{ {its} }}' for each, its in rules.items())} }}"


WIDEST = 2000  # columns; wider than that, nobody reads it


def render_text(drawn: Program | Timeline, step: float | Fraction | None = None) -> str:
    """The grid of a timeline, or of a program with a unit cost for each forward and half backward.

    ``step`` is the time that a column stands for; left out, it is the longest that divides every start and end.

    >>> from pippy.drivers.plan import make_schedule
    >>> print(render_text(make_schedule("1f1b", workers=2, chunks=3)))
    0 | F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
    1 | .  F0 B0 -- F1 B1 -- F2 B2 -- .  .
    """
    timeline = simulate(drawn).timeline if isinstance(drawn, Program) else drawn
    column = common_step(timeline) if step is None else step_of(step)
    if column <= 0:
        raise ArgumentError(f"step={beginning(step)} must be a number above zero")
    if timeline.makespan / column > WIDEST:
        raise ArgumentError(
            f"a grid of {float(timeline.makespan / column):.0f} columns is unreadable; pass a longer step"
        )
    rows = [worker_row(spans, timeline.makespan, column) for spans in timeline.spans]
    width = max((len(cell) for row in rows for cell in row), default=1)
    number = len(str(len(rows) - 1))
    return "\n".join(
        f"{worker:>{number}} | {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for worker, row in enumerate(rows)
    )


def worker_row(spans: Sequence[Span], makespan: float | Fraction, step: Fraction) -> list[str]:
    cells = ["."] * max(1, round(makespan / step))
    several = len({span.compute.stage for span in spans}) > 1
    for span in spans:
        if makespan and not span.duration:
            continue  # it would hide the pass before it, or behind it
        start = min(round(span.start / step), len(cells) - 1)
        end = max(round(span.end / step), start + 1)
        cells[start:end] = ["--"] * (end - start)
        cells[start] = str(span.compute) if several else f"{span.compute.op}{span.compute.microbatch}"
    return cells


def step_of(step: object) -> Fraction:
    """The time of a column; 0 for what is no number."""
    try:
        return Fraction(step)  # type: ignore[call-overload]
    except (TypeError, ValueError, ArithmeticError):
        return Fraction(0)


def common_step(timeline: Timeline) -> Fraction:
    """The longest step that divides all starts and ends; times are floats, so fractions are taken to a millionth."""
    times = {
        Fraction(time).limit_denominator(10**6)
        for spans in timeline.spans
        for span in spans
        for time in (span.start, span.end)
    }
    denominator = lcm(*(time.denominator for time in times))
    return Fraction(gcd(*(int(time * denominator) for time in times)) or 1, denominator)


WIDTH, LEFT, RIGHT, TOP = 1200, 110, 16, 26
ROW, GAP = 26, 5
NARROWEST_NAMED = 14  # pixels; a box that is narrower has its name in its tooltip only
TICKS = 10
DARK = {
    ".pippy-timeline": f"fill: {DARK_INK}",
    ".pippy-timeline .ground": f"fill: {DARK_GROUND}",
    ".pippy-timeline .axis line": f"stroke: {DARK_FAINT}",
    ".pippy-timeline .box text": f"fill: {NAMED}",
    ".pippy-timeline .pale text": f"fill: {DARK_INK}",
    ".pippy-timeline .box rect[stroke]": f"stroke: {DARK_GROUND}",
}
PALE = 0.4  # the shade from which a name is written in light letters on a dark page
MOST_DRAWN = 20_000  # instructions, in a notebook


@dataclass(frozen=True)
class DrawnTime:
    """A part of a worker's time, as it is drawn. ``kind`` is a class for style sheets, and ``edge`` what a script knows it by.

    ``shade`` is 0 for a worker's first stage and nears 1 for its last, which is the palest. A box with a shade is outlined.
    """

    start: float
    end: float
    name: str
    title: str
    fill: str
    kind: str = ""
    shade: float | None = None
    edge: str = ""


DrawnWorker = tuple[str, Iterable[DrawnTime]]  # the name of a worker, and what it did


def draw(
    parts: Mapping[str, Sequence[DrawnWorker]], span: float, time: Callable[[float], str], label: str, number: int = 0
) -> Element:
    """A picture of ``span``: a row for each worker, part by part, each below its title. ``time`` is how the axis says a time.

    Boxes have their times as attributes, for a script that zooms. The pictures of one page differ by ``number``.
    """
    bottom = len(parts) * TOP + sum(map(len, parts.values())) * (ROW + GAP)
    size = {"viewBox": f"0 0 {WIDTH} {bottom + 8}", "width": str(WIDTH), "height": str(bottom + 8)}
    font = {"font-family": "system-ui, sans-serif", "font-size": "11", "fill": INK}
    root = Element("svg", {"class": "pippy-timeline", **size, **font, "role": "img", "aria-label": label})
    plot = {"x": str(LEFT), "y": "0", "width": str(WIDTH - LEFT - RIGHT), "height": str(bottom)}
    SubElement(SubElement(root, "clipPath", {"id": f"plot{number}"}), "rect", plot)
    scale = (WIDTH - LEFT - RIGHT) / span
    _axis(root, span, scale, bottom, time)
    boxes = SubElement(root, "g", {"clip-path": f"url(#plot{number})", "class": "boxes"})
    top = 0
    for title, rows in parts.items():
        top += TOP
        _row_name(root, top - 25, title, {"font-weight": "bold"})
        for name, own in rows:
            _row_name(root, top, name)
            for box in own:
                _box(boxes, box, top, scale)
            top += ROW + GAP
    return root


def _axis(root: Element, span: float, scale: float, bottom: int, time: Callable[[float], str]) -> None:
    axis = SubElement(root, "g", {"class": "axis"})
    for at in ticks(span):
        x = f"{LEFT + at * scale:.2f}"
        SubElement(axis, "line", {"x1": x, "x2": x, "y1": "14", "y2": str(bottom), "stroke": FAINT})
        SubElement(axis, "text", {"x": x, "y": "10", "text-anchor": "middle"}).text = time(at)


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


def _row_name(root: Element, top: int, name: str, style: Mapping[str, str] | None = None) -> None:
    if name:
        SubElement(root, "text", {"class": "row", "x": "4", "y": str(top + 17), **(style or {})}).text = name


def _box(boxes: Element, box: DrawnTime, top: int, scale: float) -> None:
    x, width = LEFT + box.start * scale, (box.end - box.start) * scale
    pale = " pale" if (box.shade or 0.0) > PALE else ""
    group = SubElement(boxes, "g", {"class": f"box {box.kind}{pale}".strip()})
    group.attrib |= {"data-s": f"{box.start:.9f}", "data-e": f"{box.end:.9f}"}
    if box.edge:
        group.set("data-v", box.edge)
    SubElement(group, "title").text = box.title
    place = {"x": f"{x:.2f}", "y": str(top), "width": f"{width:.2f}", "height": str(ROW), "fill": box.fill}
    shade = {"fill-opacity": f"{1 - 0.6 * box.shade:.2f}", "stroke": GROUND} if box.shade is not None else {}
    SubElement(group, "rect", place | shade)
    if box.name:
        shown = {} if width >= NARROWEST_NAMED else {"visibility": "hidden"}
        middle = {"x": f"{x + width / 2:.2f}", "y": str(top + 17), "text-anchor": "middle", "fill": NAMED}
        SubElement(group, "text", middle | shown).text = box.name


def svg_file(root: Element, dark: Mapping[str, str] = DARK) -> str:
    """The text of a file with a picture, which has the style sheet ``dark`` for dark pages."""
    root.set("xmlns", "http://www.w3.org/2000/svg")
    root.insert(0, Element("rect", {"class": "ground", "width": "100%", "height": "100%", "fill": GROUND}))
    root.insert(0, Element("style"))
    root[0].text = in_the_dark(dark)
    return ElementTree.tostring(root, encoding="unicode")


def render_svg(drawn: Program | Timeline) -> str:
    """The SVG of a timeline, or of a program with a unit cost for each forward and half backward.

    >>> from pippy.drivers.plan import make_schedule
    >>> print(render_svg(make_schedule("forward_only", workers=1, chunks=1)))
    <svg class="pippy-timeline" viewBox="0 0 1200 65" width="1200" height="65" ...><title>F0.0: 0 to 1</title><rect x="110.00" \
y="26" width="1074.00" height="26" fill="#7fabea" fill-opacity="1.00" stroke="#ffffff" /><text ...>0</text></g></g>...</svg>
    """
    timeline = simulate(drawn).timeline if isinstance(drawn, Program) else drawn
    rows = [(f"worker {worker}", _boxes(spans)) for worker, spans in enumerate(timeline.spans)]
    return svg_file(draw({"": rows}, float(timeline.makespan or 1), "{:g}".format, f"timeline of {len(rows)} workers"))


def _boxes(spans: Sequence[Span]) -> Iterator[DrawnTime]:
    stages = sorted({span.compute.stage for span in spans})
    for span in spans:
        compute, start, end = span.compute, float(span.start), float(span.end)
        shade, title = stages.index(compute.stage) / len(stages), f"{compute}: {start:g} to {end:g}"
        yield DrawnTime(start, end, str(compute.microbatch), title, compute.kind.colour or INK, shade=shade)


def picture(shown: Program | Timeline | Simulation) -> str | None:
    """What a notebook shows; None for a program that cannot run, and for what is too large to be seen as one picture."""
    timeline = shown.timeline if isinstance(shown, Simulation) else shown
    size = sum(map(len, timeline.orders if isinstance(timeline, Program) else timeline.spans))
    try:
        return render_svg(timeline) if size <= MOST_DRAWN else None
    except ProgramError:
        return None


Drawn.picture = staticmethod(picture)


TraceEvent = dict[str, Any]


def track_names(process: int, title: str, names: Sequence[str]) -> Iterator[TraceEvent]:
    """The events that name a process of a trace, and its tracks: one for each worker."""
    for kind, track, own in [("process", 0, title), *(("thread", at, name) for at, name in enumerate(names))]:
        at = {"ph": "M", "pid": process, "tid": track}
        yield {**at, "name": f"{kind}_name", "args": {"name": own}}
        yield {**at, "name": f"{kind}_sort_index", "args": {"sort_index": process if kind == "process" else track}}


def trace_part(
    track: tuple[int, int], name: str, category: str, times: tuple[float, float], args: TraceEvent, unit: float = 1e6
) -> TraceEvent:
    """A part of the time of a track, which is a process and a worker. A time takes ``unit`` microseconds."""
    at = {"pid": track[0], "tid": track[1], "ts": times[0] * unit, "dur": (times[1] - times[0]) * unit}
    return {"ph": "X", "name": name, "cat": category, **at, "args": args}


def pass_slices(process: int, timeline: Timeline, unit: float = 1e6, shift: float = 0.0) -> Iterator[TraceEvent]:
    """The passes of a timeline that begins at ``shift``."""
    for worker, spans in enumerate(timeline.spans):
        for span in spans:
            compute, times = span.compute, (float(span.start) + shift, float(span.end) + shift)
            args = {"stage": compute.stage, "microbatch": compute.microbatch}
            yield trace_part((process, worker), str(compute), compute.op.name, times, args, unit)


def trace_file(events: Iterable[TraceEvent]) -> str:
    """The text of a file with trace events."""
    return json.dumps({"traceEvents": [*events], "displayTimeUnit": "ms"})


def render_trace(drawn: Program | Timeline, unit: float = 1000.0) -> str:
    """The JSON of a timeline, or of a program with a unit cost for each forward and half backward.

    ``unit`` is how many microseconds a unit of the timeline's time lasts: 1000 draws a unit cost as a millisecond;
    pass 1e6 for a recorded run in seconds.

    >>> from pippy.drivers.plan import make_schedule
    >>> trace = json.loads(render_trace(make_schedule("forward_only", workers=1, chunks=1)))
    >>> trace["traceEvents"][-1]
    {'ph': 'X', 'name': 'F0.0', 'cat': 'FORWARD', 'pid': 0, 'tid': 0, 'ts': 0.0, 'dur': 1000.0, 'args': {'stage': 0, \
'microbatch': 0}}
    """
    timeline = simulate(drawn).timeline if isinstance(drawn, Program) else drawn
    names = [f"worker {worker}" for worker in range(len(timeline.spans))]
    return trace_file([*track_names(0, "simulated", names), *pass_slices(0, timeline, unit)])
