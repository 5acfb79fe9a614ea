"""The report about a step: one HTML file that needs no other file.

Its parts, from top to bottom:

title, and what ran ─ findings ─ timeline (measured above predicted) ─ where the time went ─ stages ─ bytes ─ memory ─ steps
"""

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

from pippy.drivers.recording.colours import FILLS, css_class, dark_colours
from pippy.drivers.recording.findings import findings
from pippy.drivers.recording.memory_drawing import memory_drawing
from pippy.drivers.recording.step_data import StepData
from pippy.drivers.recording.svg import LEFT, RIGHT, WIDTH, draw, used
from pippy.drivers.recording.tables import memory, stages, times, traffic
from pippy.drivers.recording.units import duration
from pippy.drivers.schedules.simulation.held_bytes import HeldBytes

HERE = Path(__file__).parent


def page(
    step: StepData,
    kept: Sequence[StepData],
    dropped: int,
    title: str,
    counted: Sequence[HeldBytes] | None = None,
) -> str:
    """The HTML of the report about one of the ``kept`` steps of a recording. ``counted`` is what each worker should hold."""
    sections = [
        ("Timeline", _timeline(step)),
        ("Where the time went", times(step)),
        ("Stages", stages(step)),
        ("Values between workers", traffic(step)),
        ("Memory", memory(step) + memory_drawing(step, counted)),
        ("Steps", _steps(step, kept, dropped)),
    ]
    lead, *others = map(escape, findings(step))
    lead = re.sub(r"^(.*?\.)(?= |$)", r"<b>\1</b>", lead)
    said = "".join(f"<p>{sentence}</p>" for sentence in [lead, *others])
    body = "".join(f"<section><h2>{heading}</h2>{content}</section>" for heading, content in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{(HERE / 'page.css').read_text(encoding='utf-8')}{dark_colours()}</style></head>"
        f'<body><header><h1>{escape(title)}</h1><p class="what">{escape(_what(step))}</p></header>'
        f'<div class="findings">{said}</div>{body}'
        f"<script>{(HERE / 'page.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )


def _what(step: StepData) -> str:
    program, rates = step.program, step.batch.per_second(step.makespan)
    return (
        f"{program.schedule} · {_count(program.workers, 'worker')} · {_count(program.stages, 'stage')} · "
        f"{_count(program.chunks, 'micro-batch')} · {duration(step.makespan)}"
        f"{' · ' * bool(rates)}{rates}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def _timeline(step: StepData) -> str:
    drawing = ElementTree.tostring(draw(step, page=True), encoding="unicode")
    legend = "".join(
        f'<span><i class="swatch {css_class(kind)}" style="background-color:{FILLS[kind]}"></i>{escape(words)}</span>'
        for kind, words in used(step).items()
    )
    frame = json.dumps(
        {"left": LEFT, "right": WIDTH - RIGHT, "span": max(step.makespan, float(step.predicted.makespan))}
    )
    return (
        '<div class="tools"><button data-do="in">zoom in</button><button data-do="out">zoom out</button>'
        '<button data-do="all">all</button>'
        '<button data-do="arrows" aria-pressed="false">arrows of sends</button><span class="hint">'
        "click into it, and the wheel or +/− zooms; drag or arrow keys move; pointing at a box names it; "
        f"its number is {_numbers(step)}</span></div>"
        f'<div id="timeline" tabindex="0" data-frame=\'{escape(frame)}\'>{drawing}</div>'
        f'<div class="legend">{legend}</div><div id="tip" hidden></div>{_clocks(step)}'
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


def _steps(step: StepData, kept: Sequence[StepData], dropped: int) -> str:
    spans = [each.makespan for each in kept]
    longest = max(spans)
    bars = "".join(
        f'<i class="{"this" if each is step else ""}" title="step {number}: {duration(each.makespan)}" '
        f'style="height:{100 * each.makespan / longest:.1f}%"></i>'
        for number, each in enumerate(kept)
    )
    others = f", and {dropped} earlier ones dropped" if dropped else ""
    return (
        f"<p>{_count(len(spans), 'step')} kept{others}: {duration(min(spans))} to {duration(longest)}, median "
        f"{duration(median(spans))}. This page shows step {kept.index(step)}, of {duration(step.makespan)}.</p>"
        f'<div class="steps">{bars}</div>'
    )
