"""The report about a step: one HTML file that needs no other file.

Its parts, from top to bottom:

title, and what ran ─ findings ─ timeline (measured above predicted) ─ where the time went ─ stages ─ bytes ─ memory ─ steps
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

from pippy.drivers.recording.activity import Activity, Cause
from pippy.drivers.recording.findings import findings
from pippy.drivers.recording.memory_drawing import memory_drawing
from pippy.drivers.recording.step_data import StepData
from pippy.drivers.recording.svg import FILLS, LEFT, LEGEND, RIGHT, WIDTH, draw, used
from pippy.drivers.recording.units import duration, percent, size
from pippy.drivers.schedules.programs.instructions import Op
from pippy.drivers.schedules.simulation.held_bytes import HeldBytes

HERE = Path(__file__).parent
WORDS = {Cause.WAITING: "for", Cause.TRANSFER: "from", Cause.SENDING: "to"}  # before the number of the other worker
MEANINGS = {
    Cause.COMPUTING: "a forward, a backward, or half a backward of a stage",
    Cause.STARTING: "the step had yet to reach the worker and to be unpacked",
    Cause.FILL: "before the worker's first computation, nothing was there to compute on",
    Cause.WAITING: "another worker had not begun to send the value that came next",
    Cause.TRANSFER: "the value was being sent, moved or unpacked",
    Cause.SENDING: "handing values over",
    Cause.ADDING: "adding up the gradients of replicated parameters, other workers' waited for",
    Cause.PYTHON: "freeing values, and what is done after the last instruction",
    Cause.DRAIN: "the worker was done, and others were not",
}


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
        ("Where the time went", _time(step)),
        ("Stages", _stages(step)),
        ("Values between workers", _traffic(step)),
        ("Memory", _memory(step) + memory_drawing(step, counted)),
        ("Steps", _steps(step, kept, dropped)),
    ]
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in findings(step))
    body = "".join(f"<section><h2>{heading}</h2>{content}</section>" for heading, content in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{(HERE / 'page.css').read_text(encoding='utf-8')}</style></head>"
        f'<body><header><h1>{escape(title)}</h1><p class="what">{escape(_what(step))}</p></header>'
        f'<div class="findings">{said}</div>{body}'
        f"<script>{(HERE / 'page.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )


def _what(step: StepData) -> str:
    program = step.program
    return (
        f"{program.schedule} · {_count(program.workers, 'worker')} · {_count(program.stages, 'stage')} · "
        f"{_count(program.chunks, 'micro-batch')} · {duration(step.makespan)}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def _timeline(step: StepData) -> str:
    drawing = ElementTree.tostring(draw(step, page=True), encoding="unicode")
    legend = "".join(
        f'<span><i class="swatch k-{kind.replace(" ", "-")}" style="background:{FILLS[kind]}"></i>{escape(words)}</span>'
        for kind, words in used(step).items()
    )
    frame = json.dumps(
        {"left": LEFT, "right": WIDTH - RIGHT, "span": max(step.makespan, float(step.predicted.makespan))}
    )
    return (
        '<div class="tools"><button data-do="in">zoom in</button><button data-do="out">zoom out</button>'
        '<button data-do="all">all</button><span class="hint">wheel or +/− zooms, drag or arrows move, '
        "pointing at a box names it</span></div>"
        f'<div id="timeline" tabindex="0" data-frame=\'{escape(frame)}\'>{drawing}</div>'
        f'<div class="legend">{legend}</div><div id="tip" hidden></div>{_clocks(step)}'
    )


def _clocks(step: StepData) -> str:
    wrong = max(step.clock_errors)
    if not wrong:
        return ""
    worker = step.clock_errors.index(wrong)
    return (
        f"<p>The workers are on several hosts. Their clocks were brought together by the values that they sent one another; "
        f"the times of {escape(step.named(worker))} may be off by {duration(wrong)}.</p>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table of cells that are HTML; the first ``words`` columns are text, the others numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        made = (f"<{tag}{'' if at < words else ' class=n'}>{cell}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="wide"><table><thead>{row(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def _time(step: StepData) -> str:
    there = {each.cause for worker in step.activities for each in worker}
    causes = [cause for cause in Cause if cause in there]
    rows = []
    for worker, activities in enumerate(step.activities):
        cells = [f"{escape(step.named(worker))}{_bar(activities, step.makespan)}"]
        rows.append([*cells, _idle(step, worker), *(_spent_cell(step, worker, cause) for cause in causes)])
    head = ["worker", "idle", *(escape(cause) for cause in causes)]
    meanings = "".join(f"<dt>{escape(cause)}</dt><dd>{escape(MEANINGS[cause])}</dd>" for cause in causes)
    return (
        f"{_table(head, rows)}<details><summary>what these words mean</summary><dl>{meanings}"
        "<dt>idle</dt><dd>all but computing</dd><dt>predicted</dt><dd>by a simulation of the program in which computations "
        "take their measured medians, and nothing else takes time</dd></dl></details>"
    )


def _bar(activities: Sequence[Activity], whole: float) -> str:
    """A worker's time as a stacked bar, by cause."""
    parts = ""
    for cause in Cause:
        seconds = sum(each.duration for each in activities if each.cause == cause)
        if seconds:
            kind = "F" if cause == Cause.COMPUTING else cause
            words = escape(f"{cause}: {duration(seconds)}, {percent(seconds / whole)}")
            parts += (
                f'<i class="k-{kind.replace(" ", "-")}" title="{words}" '
                f'style="width:{100 * seconds / whole:.3f}%;background:{FILLS[kind]}"></i>'
            )
    return f'<span class="bar">{parts}</span>'


def _spent_cell(step: StepData, worker: int, cause: Cause) -> str:
    by_peer: dict[int | None, float] = {}
    for each in step.activities[worker]:
        if each.cause == cause:
            by_peer[each.peer] = by_peer.get(each.peer, 0.0) + each.duration
    if not by_peer:
        return "–"
    total = sum(by_peer.values())
    lines = [duration(total), f"<b>{percent(total / step.makespan)}</b>"]
    if set(by_peer) != {None}:
        lines += [
            f"<small>{WORDS[cause]} {peer}: {duration(by_peer[peer])}</small>" for peer in sorted(by_peer, key=str)
        ]
    parts = step.predicted.idle_parts[worker]
    foreseen = {Cause.FILL: parts.fill, Cause.DRAIN: parts.drain, Cause.WAITING: sum(parts.waiting.values())}
    if cause in foreseen:
        lines.append(f"<small>predicted {duration(float(foreseen[cause]))}</small>")
    return "<br>".join(lines)


def _idle(step: StepData, worker: int) -> str:
    computing = sum(each.duration for each in step.activities[worker] if each.cause == Cause.COMPUTING)
    foreseen, whole = float(step.predicted.idle[worker]), float(step.predicted.makespan) or 1.0
    idle = step.makespan - computing
    return (
        f"{duration(idle)}<br><b>{percent(idle / step.makespan)}</b><br>"
        f"<small>predicted {percent(foreseen / whole)}<br>{duration(foreseen)}</small>"
    )


def _stages(step: StepData) -> str:
    kinds = [op for op in Op if any(step.medians[op])]
    totals = [sum(step.medians[op][stage] for op in kinds) for stage in range(step.program.stages)]
    rows = []
    for stage, total in enumerate(totals):
        worker = step.program.placement.worker_of[stage]
        share = 100 * total / (max(totals) or 1.0)
        mark = " <b>slowest</b>" if total == max(totals) and len(totals) > 1 else ""
        passes = [duration(step.medians[op][stage]) if step.medians[op][stage] else "–" for op in kinds]
        bar = f'<span class="bar"><i class="k-F" style="width:{share:.2f}%;background:{FILLS["F"]}"></i></span>'
        rows.append([f"stage {stage}{mark}{bar}", escape(step.named(worker)), *passes, duration(total)])
    head = ["stage", "on", *(escape(LEGEND[str(op)]) for op in kinds), "together"]
    return f"<p>Medians over the micro-batches.</p>{_table(head, rows, words=2)}"


def _traffic(step: StepData) -> str:
    took: dict[tuple[str, int, int], list[float]] = {}
    for worker, (order, activities) in enumerate(zip(step.program.orders, step.activities)):
        for each in activities:
            if each.cause == Cause.TRANSFER and each.at is not None:
                receive = order[each.at]
                key = getattr(receive, "value", ""), each.peer or 0, worker
                took.setdefault(key, []).append(each.duration)
    rows = []
    for moved in step.traffic():
        times = took.get((moved.value, moved.source, moved.to))
        rows.append(
            [
                escape(moved.value),
                f"{escape(step.named(moved.source))} → {escape(step.named(moved.to))}",
                str(moved.times),
                size(moved.bytes / moved.times),
                size(moved.bytes),
                duration(median(times)) if times else "–",
            ]
        )
    if not rows:
        return "<p>No value went from worker to worker.</p>"
    total = f"<p>{size(sum(each.bytes for each in step.traffic()))} in all.</p>"
    return total + _table(["value", "edge", "times", "each", "together", "on its way (median)"], rows, words=2)


def _memory(step: StepData) -> str:
    rows = [
        [
            escape(step.named(worker)),
            ", ".join(map(str, step.stages_of(worker))),
            size(noted.memory),
            escape(noted.memory_of),
            str(step.program.peak_live[worker]),
        ]
        for worker, noted in enumerate(step.noted)
    ]
    head = ["worker", "stages", "peak", "of what", "micro-batches held"]
    note = (
        "<p>Resident is the whole process: Python and torch themselves, the parameters, gradients and optimizer states of its "
        "stages, and what is kept for backwards. What was freed stays resident for the next use. Micro-batches held counts, "
        "over the worker's stages, those between forward and backward, at most.</p>"
    )
    return _table(head, rows) + note


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
