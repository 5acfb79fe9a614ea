"""Draws a timeline as a picture: a row a worker, a box a pass, coloured by kind, shaded by stage."""

from html import escape

from pippy.drivers.plan.cost.simulate import Simulation, simulate
from pippy.drivers.plan.cost.timeline import Span, Timeline
from pippy.drivers.plan.drawings.colours import DARK_GROUND, DARK_INK, GROUND, INK, NAMED, in_the_dark
from pippy.drivers.plan.language.drawn import Drawn
from pippy.drivers.plan.language.errors import ProgramError
from pippy.drivers.plan.language.program import Program

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
