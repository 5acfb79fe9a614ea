"""The report about a step. Its parts, from top to bottom:

title ─ steps, to click through ─ what ran ─ largest loss, and other findings ─ timeline (measured above predicted) ─
where the time went ─ stages ─ values between workers ─ memory

Two recordings stand side by side on one page: what is shorter and what is longer, and both timelines to one scale.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from gzip import compress
from html import escape
from pathlib import Path
from statistics import median

from pippy.drivers.plan.cost.held_bytes import HeldBytes
from pippy.drivers.plan.language.program import Program
from pippy.drivers.report.drawings import FILLS, css_class, dark_colours, timeline
from pippy.drivers.report.findings import StepPart, findings, step_parts
from pippy.drivers.report.step_data import StepData
from pippy.drivers.report.tables import memory_table, report_table, stages, times, traffic
from pippy.ir.base.readable import bytes_text, count_with_noun, duration, percent

# One HTML file that needs no other file, and parts that several of its kind have.


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


MOST_STEPS = 12
MOST_INSTRUCTIONS = 10_000  # of all steps together that are packed
MEMORY_WIDTH, HEIGHT = 900, 80
Series = tuple[str, Sequence[int]]  # "measured" or "counted", and the most bytes held while each instruction ran
HOW = (
    "<p>For memory over time, record with <code>driver.record(memory=True)</code>; "
    "<code>recording.report(path, memory=driver.memory(...))</code> draws what was counted before beside it.</p>"
)
Counted = Callable[
    [Program], Sequence[HeldBytes] | None
]  # what each worker should hold in a program; None if not known


def page(
    step: StepData, recorded: Sequence[StepData], dropped: int, title: str, counted: Counted = lambda _: None
) -> str:
    """The HTML of the report about one of the ``recorded`` steps of a recording, with others of them to click on."""
    strip = steps_strip(step, recorded, dropped, lambda each: about(each, counted(each.program)))
    return html_document(title, f'{strip}<main id="step">{about(step, counted(step.program))}</main>')


def about(step: StepData, counted: Sequence[HeldBytes] | None = None) -> str:
    """All that a report says of one step, as HTML."""
    lead, *others = map(escape, findings(step))
    lead = re.sub(r"^(.*?\.)(?= |$)", r"<b>\1</b>", lead)
    said = "".join(f"<p>{sentence}</p>" for sentence in others)
    return (
        f'<p class="what">{what_ran(step)}</p>'
        f'<div class="findings"><p>{lead}</p>'
        f'<p class="hint">What made the step as long as it was:</p>{parts_bar(step, step.makespan)}{said}</div>'
    ) + sections(
        [
            ("Timeline", timeline(step)),
            ("Where the time went", times(step)),
            ("Stages", stages(step)),
            ("Values between workers", traffic(step)),
            ("Memory", memory_table(step) + memory_drawing(step, counted)),
        ]
    )


# Draws what each worker held over the time of a recorded step: measured, and beside it what was counted before.


def memory_drawing(step: StepData, counted: Sequence[HeldBytes] | None) -> str:
    """A picture for each worker, as HTML, all to one scale; how to get them if nothing was measured."""
    held = [list(_series(step, worker, counted)) for worker in range(len(step.noted))]
    highest = max((max(numbers) for series in held for _, numbers in series), default=0)
    if not highest:
        return HOW
    named = {name: None for series in held for name, _ in series}
    legend = "".join(f'<span><i class="swatch held-{name}"></i>{_words(name)}</span>' for name in named)
    drawn = "".join(_of_worker(step, worker, series, highest) for worker, series in enumerate(held))
    return (
        f"<h3>What workers held over the step</h3><p>Tensors that were alive, to the scale of the largest peak, "
        f'{bytes_text(highest)}.</p><div class="legend">{legend}</div><div class="held">{drawn}</div>'
    )


def _words(name: str) -> str:
    return {"counted": "counted before it ran"}.get(name, name)


def _series(step: StepData, worker: int, counted: Sequence[HeldBytes] | None) -> Iterator[Series]:
    if step.held:
        yield "measured", step.held[worker][0]
    if counted:
        yield "counted", counted[worker].most


def _of_worker(step: StepData, worker: int, held: Sequence[Series], highest: int) -> str:
    drawn = "".join(_line(step, worker, name, numbers, highest) for name, numbers in held)
    peaks = ", ".join(f"{name} {bytes_text(max(numbers))}" for name, numbers in held)
    words = escape(f"{step.named(worker)}: at its peak {peaks}", quote=True)
    return (
        f"<figure><figcaption>{words}{_difference(held)}</figcaption>"
        f'<svg viewBox="0 0 {MEMORY_WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{words}">{drawn}</svg>'
        f'<div class="ends"><span>0 s</span><span>{duration(step.makespan)}</span></div></figure>'
    )


def _difference(held: Sequence[Series]) -> str:
    """How far the count is from what was measured."""
    peaks = [max(numbers) for _, numbers in held]
    if len(peaks) < 2 or not peaks[0]:
        return ""
    share = 100 * (peaks[1] / peaks[0] - 1)
    return f" ({share:+.1f} %)" if round(share, 1) else " (the same)"


def _line(step: StepData, worker: int, name: str, numbers: Sequence[int], highest: int) -> str:
    points = list(_points(step, worker, numbers, highest))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    area = ""
    if name == "measured" and points:
        area = f'<polygon points="{points[0][0]:.1f},{HEIGHT} {line} {points[-1][0]:.1f},{HEIGHT}"/>'
    return (
        f'<g class="held-{name}">{area}<polyline fill="none" vector-effect="non-scaling-stroke" points="{line}"/></g>'
    )


def _points(step: StepData, worker: int, numbers: Sequence[int], highest: int) -> Iterator[tuple[float, float]]:
    """Steps: what was held while an instruction ran, from its beginning to its end."""
    record = step.records[worker]
    begin, length = record.started, step.makespan or 1.0
    for end, held in sorted(zip([*record.ends, record.ended], numbers)):
        y = 2 + (HEIGHT - 2) * (1 - held / highest)
        yield MEMORY_WIDTH * begin / length, y
        yield MEMORY_WIDTH * end / length, y
        begin = end


# The steps of a recording as a strip of bars at the top of its report: a click on one shows it.
#
# What the page says of the other steps is packed: a script unpacks the one that is asked for. So that a page stays small, not
# every step is there: the step that is shown, the longest, the shortest, and the latest ones.


def steps_strip(shown: StepData, recorded: Sequence[StepData], dropped: int, about: Callable[[StepData], str]) -> str:
    """The strip as HTML. ``about`` makes what the page says of a step."""
    lengths = [each.makespan for each in recorded]
    at = next(number for number, each in enumerate(recorded) if each is shown)
    there = packed_steps(at, recorded)
    bars = "".join(
        _step_bar(number, each, max(lengths), number == at, number in there) for number, each in enumerate(recorded)
    )
    packed = "".join(_packed(number, about(recorded[number])) for number in there if number != at)
    others = f", and {dropped} earlier ones dropped" if dropped else ""
    missing = "" if len(there) == len(recorded) else " Grey bars are not on this page; report(step=...) shows them."
    said = (
        f"{count_with_noun(len(recorded), 'step')}{others}: {duration(min(lengths))} to {duration(max(lengths))}, median "
        f"{duration(median(lengths))}. "
    )
    buttons = '<button data-go="-1">‹ step before</button><button data-go="1">step after ›</button>'
    return (
        f'<nav><p>{said}<span id="shown">This page shows step {at}, of {duration(shown.makespan)}.</span>{missing}</p>'
        + (f'<div class="steps">{bars}</div><div class="tools">{buttons}</div>{packed}' if len(recorded) > 1 else "")
        + "</nav>"
    )


def packed_steps(shown: int, recorded: Sequence[StepData]) -> list[int]:
    """The numbers of the steps that the page has."""
    by_length = sorted(range(len(recorded)), key=lambda number: recorded[number].makespan)
    wanted = dict.fromkeys([shown, by_length[-1], by_length[0], *reversed(range(len(recorded)))])
    packed, room = [shown], MOST_INSTRUCTIONS
    for number in [each for each in wanted if each != shown][: MOST_STEPS - 1]:
        room -= sum(map(len, recorded[number].program.orders))
        if room >= 0:
            packed.append(number)
    return sorted(packed)


def _step_bar(number: int, step: StepData, longest: float, shown: bool, there: bool) -> str:
    words = f"step {number}: {duration(step.makespan)}"
    state = 'aria-current="true"' if shown else "" if there else "disabled"
    height = 100 * step.makespan / (longest or 1.0)
    return f'<button data-step="{number}" title="{escape(words)}" {state}><i style="height:{height:.1f}%"></i></button>'


def _packed(number: int, text: str) -> str:
    return f'<template id="step-{number}">{b64encode(compress(text.encode(), mtime=0)).decode()}</template>'


StepPair = tuple[StepData, StepData]
Names = tuple[str, str]
ROUNDING_SECONDS = 1e-9  # seconds; less is rounding


def comparison(
    steps: StepPair, recorded: tuple[Sequence[StepData], Sequence[StepData]], names: Names, title: str
) -> str:
    """The HTML that compares a step of one recording with a step of another. ``recorded`` are all the steps of each."""
    longest = max(each.makespan for each in steps)
    span = max(longest, *(float(each.predicted.makespan) for each in steps))
    notes = filter(None, (unlike(steps, names), by_chance(recorded, names)))
    lead = (
        f'<div class="findings"><p><b>{escape(difference(steps, names))}</b> {escape(largest_difference(steps))}</p>'
        f"{''.join(f'<p>{escape(note)}</p>' for note in notes)}</div>"
    )
    bars = [parts_bar(each, longest) for each in steps]
    views = [timeline(each, span, number) for number, each in enumerate(steps)]
    said = ["".join(f"<p>{escape(sentence)}</p>" for sentence in findings(each)) for each in steps]
    return html_document(
        title,
        lead
        + sections(
            [
                ("What made the steps as long as they were", _side_by_side(steps, names, bars) + _parts(steps, names)),
                ("Timelines", _side_by_side(steps, names, views)),
                ("Stages", _stages(steps, names)),
                ("Memory", _memory(steps, names)),
                ("Findings", _side_by_side(steps, names, said)),
            ]
        ),
    )


def difference(steps: StepPair, names: Names) -> str:
    """Says which of the steps is shorter, and by how much."""
    first, second = (each.makespan for each in steps)
    share = abs(second - first) / (first or 1.0)
    than = f"{names[1]} takes {duration(second)} for a step, {names[0]} {duration(first)}"
    return f"{than}: {percent(share)} {'shorter' if second < first else 'longer'}." if second != first else f"{than}."


def largest_difference(steps: StepPair) -> str:
    """Says which part of the steps differs most."""
    changes = changed(steps)
    part = max(changes, key=lambda each: abs(changes[each]))
    if abs(changes[part]) < ROUNDING_SECONDS:
        return ""
    more = "more" if changes[part] > 0 else "less"
    return f"The largest difference is {part}: {duration(abs(changes[part]))} {more}."


def changed(steps: StepPair) -> dict[StepPart, float]:
    """By how many seconds each part of the second step is longer than that of the first. Together: the whole difference."""
    first, second = map(step_parts, steps)
    return {part: second.get(part, 0.0) - first.get(part, 0.0) for part in StepPart if part in first or part in second}


def by_chance(recorded: tuple[Sequence[StepData], Sequence[StepData]], names: Names) -> str:
    """Says so if steps of one recording are as long as those of the other, so that the difference may be chance."""
    (low, high), (other_low, other_high) = ((min(each), max(each)) for each in map(_lengths, recorded))
    ranges = " and ".join(
        f"{duration(min(lengths))} to {duration(max(lengths))} in {name} ({count_with_noun(len(lengths), 'step')})"
        for name, lengths in zip(names, map(_lengths, recorded))
    )
    if low > other_high or other_low > high:
        return f"All steps of one are shorter than all of the other: {ranges}."
    return (
        f"Steps of one are as long as some of the other: {ranges}. The difference may be chance; record more of them."
    )


def unlike(steps: StepPair, names: Names) -> str:
    """Says so if the steps do not compute the same amount, so that their lengths say little."""
    rows = [each.batch.samples for each in steps]
    if None in rows or rows[0] == rows[1]:
        return ""
    rates = " and ".join(
        f"{name} {step.batch.per_second(step.makespan)} of {rows_of_step} samples a step"
        for name, step, rows_of_step in zip(names, steps, rows)
    )
    return f"The mini-batches differ in size, so compare samples per second, not steps: {rates}."


def _lengths(steps: Sequence[StepData]) -> list[float]:
    return [each.makespan for each in steps]


def _side_by_side(steps: StepPair, names: Names, contents: Sequence[str]) -> str:
    halves = (
        f'<div><h3>{escape(name)}</h3><p class="what">{what_ran(step)}</p>{content}</div>'
        for name, step, content in zip(names, steps, contents)
    )
    return f'<div class="pair">{"".join(halves)}</div>'


def _parts(steps: StepPair, names: Names) -> str:
    first, second = map(step_parts, steps)
    changes = changed(steps)
    rows = [
        [escape(part), duration(first.get(part, 0.0)), duration(second.get(part, 0.0)), _signed(changes[part])]
        for part in sorted(changes, key=lambda each: -abs(changes[each]))
    ]
    total = [f"<b>{cell}</b>" for cell in ("the step", *(duration(each.makespan) for each in steps))]
    rows.append([*total, f"<b>{_signed(steps[1].makespan - steps[0].makespan)}</b>"])
    return report_table(["part", *map(escape, names), "difference"], rows)


def _signed(seconds: float) -> str:
    """
    >>> _signed(0.5), _signed(-0.002), _signed(1e-16)
    ('+500 ms', '−2 ms', '0 s')
    """
    if abs(seconds) < ROUNDING_SECONDS:
        return duration(0.0)
    return f"{'+' if seconds > 0 else '−'}{duration(abs(seconds))}"


def _stages(steps: StepPair, names: Names) -> str:
    rows = []
    for stage in range(max(each.program.stages for each in steps)):
        modules = dict.fromkeys(each.model.modules(stage) for each in steps if each.model.modules(stage))
        took = [each.stage_seconds for each in steps]
        first, second = (each[stage] if stage < len(each) else None for each in took)
        cells = ["–" if each is None else duration(each) for each in (first, second)]
        change = "–" if first is None or second is None else _signed(second - first)
        name = f"stage {stage}<br><small>{escape(' → '.join(modules))}</small>"
        rows.append([name, *cells, change])
    return "<p>For one micro-batch: medians.</p>" + report_table(["stage", *map(escape, names), "difference"], rows)


def _memory(steps: StepPair, names: Names) -> str:
    rows = []
    for worker in range(max(len(each.noted) for each in steps)):
        peaks = [bytes_text(each.noted[worker].memory) if worker < len(each.noted) else "–" for each in steps]
        rows.append([f"worker {worker}", *peaks])
    kinds = " and ".join(dict.fromkeys(noted.memory_of for each in steps for noted in each.noted))
    return f"<p>The peak of each worker, {escape(kinds)}.</p>" + report_table(["worker", *map(escape, names)], rows)
