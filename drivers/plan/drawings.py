"""How a timeline is shown: as a grid of text, as a picture, and as trace events.

In the grid, as papers draw schedules, a line is a worker, and time runs to the right in steps of one column. A pass begins with
its name (``F3`` or, if its worker holds several stages, ``F5.3``: stage 5, micro-batch 3) and goes on with dashes; dots are
idle. What takes no time is left out.

In the picture a row is a worker and a box a pass, coloured by kind, shaded by stage. Perfetto (ui.perfetto.dev) and Chrome
(chrome://tracing) open the trace events.
"""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from html import escape
from math import gcd, lcm

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


WIDTH, MARGIN = 1200, 60
ROW, GAP = 28, 4
NARROWEST_NAMED = 14  # pixels; a box that is narrower has its name in its tooltip only
DARK = in_the_dark(
    {
        ".pippy-timeline .ground": f"fill: {DARK_GROUND}",
        ".pippy-timeline > g[fill] text": f"fill: {DARK_INK}",
        ".pippy-timeline .pale text": f"fill: {DARK_INK}",
        ".pippy-timeline g rect": f"stroke: {DARK_GROUND}",
    }
)
PALE = 0.4  # the shade from which a name is written in light letters on a dark page
MOST_DRAWN = 20_000  # instructions, in a notebook


def render_svg(drawn: Program | Timeline) -> str:
    """The SVG of a timeline, or of a program with a unit cost for each forward and half backward.

    >>> from pippy.drivers.plan import make_schedule
    >>> print(render_svg(make_schedule("forward_only", workers=1, chunks=1)))
    <svg class="pippy-timeline" xmlns="http://www.w3.org/2000/svg" width="1200" height="36" ...>
    <style>@media (prefers-color-scheme: dark) { .pippy-timeline .ground { fill: #0d1117 } ...</style>
    <rect class="ground" width="1200" height="36" fill="#ffffff"/>
    <g fill="#1f2328"><text x="4" y="22">worker 0</text></g>
    <g><title>F0.0: 0 to 1</title><rect x="60.00" y="4" width="1136.00" height="28" fill="#7fabea" fill-opacity="1.00" \
stroke="#ffffff"/><text x="628.00" y="22" text-anchor="middle" fill="#10151b">0</text></g>
    </svg>
    """
    timeline = simulate(drawn).timeline if isinstance(drawn, Program) else drawn
    scale = (WIDTH - MARGIN - GAP) / float(timeline.makespan or 1)
    stages = [sorted({span.compute.stage for span in spans}) for spans in timeline.spans]
    boxes = [
        box(span, GAP + worker * (ROW + GAP), scale, stages[worker].index(span.compute.stage) / len(stages[worker]))
        for worker, spans in enumerate(timeline.spans)
        for span in spans
    ]
    height = GAP + len(timeline.spans) * (ROW + GAP)
    names = [f'<text x="4" y="{22 + i * (ROW + GAP)}">worker {i}</text>' for i in range(len(timeline.spans))]
    size = f'width="{WIDTH}" height="{height}"'
    ground = f'<rect class="ground" {size} fill="{GROUND}"/>'
    names = [f'<g fill="{INK}">', *names, "</g>"]
    head = f'<svg class="pippy-timeline" xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, f"<style>{DARK}</style>", ground, "".join(names), *boxes, "</svg>"])


def box(span: Span, top: int, scale: float, shade: float) -> str:
    """A pass; ``shade`` is 0 for the worker's first stage and nears 1 for its last, which is the palest."""
    left, width = MARGIN + float(span.start) * scale, float(span.duration) * scale
    title = escape(f"{span.compute}: {float(span.start):g} to {float(span.end):g}")
    name = f'<text x="{left + width / 2:.2f}" y="{top + 18}" text-anchor="middle" fill="{NAMED}">'
    pale = ' class="pale"' if shade > PALE else ""
    name += f"{span.compute.microbatch}</text>"
    return (
        f'<g{pale}><title>{title}</title><rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{ROW}"'
        f' fill="{span.compute.kind.colour}" fill-opacity="{1 - 0.6 * shade:.2f}" stroke="{GROUND}"/>'
        f"{name if width >= NARROWEST_NAMED else ''}</g>"
    )


def picture(shown: Program | Timeline | Simulation) -> str | None:
    """What a notebook shows; None for a program that cannot run, and for what is too large to be seen as one picture."""
    timeline = shown.timeline if isinstance(shown, Simulation) else shown
    size = sum(map(len, timeline.orders if isinstance(timeline, Program) else timeline.spans))
    try:
        return render_svg(timeline) if size <= MOST_DRAWN else None
    except ProgramError:
        return None


Drawn.picture = staticmethod(picture)


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
