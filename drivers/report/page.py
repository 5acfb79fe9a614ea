"""The report about a step. Its parts, from top to bottom:

title ─ lengths of all steps ─ what ran ─ largest loss, and other findings ─ timeline (measured above predicted) ─
where the time went ─ stages ─ values between workers ─ memory

Two recordings stand side by side on one page: what is shorter and what is longer, and both timelines to one scale.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median

from pippy.drivers.plan.cost.held_bytes import HeldBytes
from pippy.drivers.report.drawings import FILLS, css_class, dark_colours, step_span, timeline
from pippy.drivers.report.findings import StepPart, findings, step_parts
from pippy.drivers.report.step_data import StepData
from pippy.drivers.report.tables import bar, memory_table, report_table, stages, times, tip, traffic
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
    return "".join(f"<section>{heading and f'<h2>{heading}</h2>'}{content}</section>" for heading, content in of)


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
    parts, names = [], ""
    for part, seconds in step_parts(step).items():
        kind, share = PART_KINDS.get(part, str(part)), seconds / (step.makespan or 1.0)
        words = f"{part}: {duration(seconds)}, {percent(share)}\n{PART_MEANINGS[part]}"
        parts.append((kind, seconds, words))
        if share >= 0.005:
            swatch = f'<i class="{css_class(kind)} swatch" style="background-color:{FILLS[kind]}"></i>'
            names += tip(f"{swatch}{escape(part)} {duration(seconds)}", words)
    return f'{bar(parts, full_width, " parts")}<div class="legend">{names}</div>'


MEMORY_WIDTH, HEIGHT = 900, 80
Series = tuple[str, Sequence[int]]  # "measured" or "counted", and the most bytes held while each instruction ran
HOW = (
    "<p>For memory over time, record with <code>driver.record(memory=True)</code>; "
    "<code>recording.report(path, memory=driver.memory(...))</code> draws what was counted before beside it.</p>"
)


def page(
    step: StepData,
    recorded: Sequence[StepData],
    dropped: int,
    title: str,
    counted: Sequence[HeldBytes] | None = None,
) -> str:
    """The HTML of the report about one of the ``recorded`` steps of a recording. ``counted`` is what workers should hold."""
    head = f'{steps_strip(step, recorded, dropped)}<p class="what">{what_ran(step)}</p>'
    return html_document(title, head + sections(contents(step, counted)))


def contents(
    step: StepData, counted: Sequence[HeldBytes] | None = None, span: float = 0.0, number: int = 0
) -> list[tuple[str, str]]:
    """What a report says of one step, below its headings. Its drawings have ``span`` seconds at least, and differ from those of
    other steps on the page by ``number``."""
    lead, *others = map(escape, findings(step))
    lead = re.sub(r"^(.*?\.)(?= |$)", r"<b>\1</b>", lead)
    said = "".join(f"<p>{sentence}</p>" for sentence in others)
    parts = f'<p class="hint">What made the step as long as it was:</p>{parts_bar(step, max(span, step.makespan))}'
    return [
        ("", f'<div class="findings"><p>{lead}</p>{parts}{said}</div>'),
        ("Timeline", timeline(step, span, number)),
        ("Where the time went", times(step)),
        ("Stages", stages(step)),
        ("Values between workers", traffic(step)),
        ("Memory", memory_table(step) + memory_drawing(step, counted)),
    ]


# Draws what each worker held over the time of a recorded step: measured, and beside it what was counted before.


def memory_drawing(step: StepData, counted: Sequence[HeldBytes] | None) -> str:
    """A picture for each worker, as HTML, all to one scale; how to get them if nothing was measured."""
    held = [dict(_series(step, worker, counted)) for worker in range(len(step.noted))]
    highest = max((max(numbers) for series in held for numbers in series.values()), default=0)
    if not highest:
        return HOW
    legend = "".join(f'<span><i class="swatch held-{name}"></i>{name}</span>' for name in held[0])
    drawn = "".join(_of_worker(step, worker, series, highest) for worker, series in enumerate(held))
    return (
        f"<h3>What workers held over the step</h3><p>Tensors that were alive, to the scale of the largest peak, "
        f'{bytes_text(highest)}; counted is before the step ran.</p><div class="legend">{legend}</div>'
        f'<div class="held">{drawn}</div>'
    )


def _series(step: StepData, worker: int, counted: Sequence[HeldBytes] | None) -> Iterator[Series]:
    if step.held:
        yield "measured", step.held[worker][0]
    if counted:
        yield "counted", counted[worker].most


def _of_worker(step: StepData, worker: int, held: Mapping[str, Sequence[int]], highest: int) -> str:
    drawn = ""
    for name, numbers in held.items():
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in _points(step, worker, numbers, highest))
        drawn += f'<polyline class="held-{name}" fill="none" vector-effect="non-scaling-stroke" points="{line}"/>'
    peaks = {name: max(numbers) for name, numbers in held.items()}
    words = escape(
        f"{step.named(worker)}: at its peak {', '.join(f'{name} {bytes_text(each)}' for name, each in peaks.items())}"
    )
    apart = (
        f" ({100 * (peaks['counted'] / peaks['measured'] - 1):+.1f} %)" if len(peaks) == 2 and peaks["measured"] else ""
    )
    return (
        f"<figure><figcaption>{words}{apart}</figcaption>"
        f'<svg viewBox="0 0 {MEMORY_WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{words}">{drawn}</svg>'
        f'<div class="ends"><span>0 s</span><span>{duration(step.makespan)}</span></div></figure>'
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


# The steps of a recording as a strip of bars at the top of its report.


def steps_strip(shown: StepData, recorded: Sequence[StepData], dropped: int) -> str:
    """The strip as HTML: the length of each step, and which one the page shows."""
    lengths = [each.makespan for each in recorded]
    others = f", and {dropped} earlier ones dropped" if dropped else ""
    said = (
        f"{count_with_noun(len(recorded), 'step')}{others}: {duration(min(lengths))} to {duration(max(lengths))}, median "
        f"{duration(median(lengths))}."
    )
    bars = "".join(
        f'<i title="{escape(f"step {number}: {duration(each.makespan)}")}" {"aria-current" * (each is shown)} '
        f'style="height:{100 * each.makespan / (max(lengths) or 1.0):.1f}%"></i>'
        for number, each in enumerate(recorded)
    )
    at = next(number for number, each in enumerate(recorded) if each is shown)
    here = f"This page shows step {at}, of {duration(shown.makespan)}; report(step=...) shows another."
    return f'<nav><p>{said} {here}</p><div class="steps">{bars}</div></nav>'


StepPair = tuple[StepData, StepData]
Names = tuple[str, str]
ROUNDING_SECONDS = 1e-9  # seconds; less is rounding


def comparison(
    steps: StepPair, recorded: tuple[Sequence[StepData], Sequence[StepData]], names: Names, title: str
) -> str:
    """The HTML that compares a step of one recording with a step of another. ``recorded`` are all the steps of each."""
    span = max(map(step_span, steps))
    notes = filter(None, (largest_difference(steps), unlike(steps, names), by_chance(recorded, names)))
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    pairs = zip(*(contents(step, None, span, number) for number, step in enumerate(steps)))
    both = [(heading, _side_by_side(steps, names, [text, other])) for (heading, text), (_, other) in pairs]
    return html_document(
        title,
        f'<div class="findings"><p><b>{escape(difference(steps, names))}</b></p>{said}</div>'
        + sections([("What made the steps as long as they were", _parts(steps, names)), *both]),
    )


def _side_by_side(steps: StepPair, names: Names, contents: Sequence[str]) -> str:
    halves = (
        f'<div><h3>{escape(name)}</h3><p class="what">{what_ran(step)}</p>{content}</div>'
        for name, step, content in zip(names, steps, contents)
    )
    return f'<div class="pair">{"".join(halves)}</div>'


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
