"""The timeline of a step on a page: the drawing, with what zooms and explains it."""

import json
from html import escape
from xml.etree import ElementTree

from pippy.drivers.report.colours import FILLS, css_class
from pippy.drivers.report.step_data import StepData
from pippy.drivers.report.svg import DRAWING_WIDTH, LEFT, RIGHT, draw, used
from pippy.ir.base.readable import duration


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
