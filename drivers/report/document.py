"""One HTML file that needs no other file, and parts that several of its kind have."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from pippy.drivers.report.colours import FILLS, css_class, dark_colours
from pippy.drivers.report.losses import StepPart, step_parts
from pippy.drivers.report.step_data import StepData
from pippy.ir.base.readable import count_with_noun, duration, percent

HERE = Path(__file__).parent
PART_KINDS = {
    StepPart.COMPUTING: "F",
    StepPart.SCHEDULE: "fill",
    StepPart.UNEVEN: "waiting",
    StepPart.SLOWER: "R",
}  # others have their own

PART_MEANINGS = {
    StepPart.COMPUTING: "all computations, divided evenly among the workers",
    StepPart.SCHEDULE: "workers fill, drain and wait for one another, also if all stages take the same time",
    StepPart.UNEVEN: "what the step would be shorter if all stages took the same time",
    StepPart.STARTING: "the step had yet to reach a worker that others wait for",
    StepPart.TRANSFER: "a value that is waited for was on its way",
    StepPart.SENDING: "values were handed over, and others waited",
    StepPart.ADDING: "gradients were added up: of replicated parameters, and of values that several stages read",
    StepPart.PYTHON: "between the instructions, and after the last one",
    StepPart.SLOWER: "computations that others wait for took longer than those of other micro-batches",
}


def html_document(title: str, body: str) -> str:
    """The HTML of a page with its styles and its script. Nothing is loaded from elsewhere."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{(HERE / 'page.css').read_text(encoding='utf-8')}{dark_colours()}</style></head>"
        f'<body><header><h1>{escape(title)}</h1></header>{body}<div id="tip" hidden></div>'
        f"<script>{(HERE / 'page.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )


def sections(of: Sequence[tuple[str, str]]) -> str:
    """Headings, each with its HTML."""
    return "".join(f"<section><h2>{heading}</h2>{content}</section>" for heading, content in of)


def what_ran(step: StepData) -> str:
    """The schedule, the counts and the length of a step in a line."""
    program, rates = step.program, step.batch.per_second(step.makespan)
    counts = (
        count_with_noun(program.workers, "worker"),
        count_with_noun(program.stages, "stage"),
        count_with_noun(program.chunks, "micro-batch"),
    )
    return escape(" · ".join(filter(None, (f"schedule {program.schedule}", *counts, duration(step.makespan), rates))))


def parts_bar(step: StepData, full_width: float) -> str:
    """The parts of a step's length as a bar; ``full_width`` seconds are as wide as the page."""
    seconds_of = {part: seconds for part, seconds in step_parts(step).items() if seconds > 0}
    bars = names = ""
    for part, seconds in seconds_of.items():
        kind = PART_KINDS.get(part, str(part))
        words = escape(
            f"{part}: {duration(seconds)}, {percent(seconds / (step.makespan or 1.0))}\n{PART_MEANINGS[part]}"
        )
        fill = f'class="{css_class(kind)}{{}}" style="{{}}background-color:{FILLS[kind]}"'
        bars += f'<i {fill.format("", f"width:{100 * seconds / (full_width or 1.0):.3f}%;")} title="{words}"></i>'
        if seconds >= 0.005 * step.makespan:
            swatch = f"<i {fill.format(' swatch', '')}></i>"
            names += f'<span title="{words}" tabindex="0">{swatch}{escape(part)} {duration(seconds)}</span>'
    return f'<div class="bar parts">{bars}</div><div class="legend">{names}</div>'
