"""Draws a timeline as a grid of text, one line a worker, as papers draw schedules.

Time runs to the right in steps of one column. A pass begins with its name (``F3`` or, if its worker holds several
stages, ``F5.3``: stage 5, micro-batch 3) and goes on with dashes; dots are idle. What takes no time is left out.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

from pippy.drivers.plan.cost.simulate import simulate
from pippy.drivers.plan.cost.timeline import Span, Timeline
from pippy.drivers.plan.language.errors import ArgumentError, beginning
from pippy.drivers.plan.language.program import Program

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
