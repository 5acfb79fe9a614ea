"""Two recordings on one page, side by side: what is shorter and what is longer, and both timelines to one scale."""

from collections.abc import Sequence
from html import escape

from pippy.drivers.report.drawings import timeline
from pippy.drivers.report.findings import findings
from pippy.drivers.report.losses import StepPart, step_parts
from pippy.drivers.report.page import html_document, parts_bar, sections, what_ran
from pippy.drivers.report.step_data import StepData
from pippy.drivers.report.tables import report_table
from pippy.ir.base.readable import bytes_text, count_with_noun, duration, percent

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
        first, second = (_took(each, stage) for each in steps)
        cells = ["–" if each is None else duration(each) for each in (first, second)]
        change = "–" if first is None or second is None else _signed(second - first)
        name = f"stage {stage}<br><small>{escape(' → '.join(modules))}</small>"
        rows.append([name, *cells, change])
    return "<p>For one micro-batch: medians.</p>" + report_table(["stage", *map(escape, names), "difference"], rows)


def _took(step: StepData, stage: int) -> float | None:
    return sum(its[stage] for its in step.medians.values()) if stage < step.program.stages else None


def _memory(steps: StepPair, names: Names) -> str:
    rows = []
    for worker in range(max(len(each.noted) for each in steps)):
        peaks = [bytes_text(each.noted[worker].memory) if worker < len(each.noted) else "–" for each in steps]
        rows.append([f"worker {worker}", *peaks])
    kinds = " and ".join(dict.fromkeys(noted.memory_of for each in steps for noted in each.noted))
    return f"<p>The peak of each worker, {escape(kinds)}.</p>" + report_table(["worker", *map(escape, names)], rows)
