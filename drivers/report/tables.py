"""The tables of a report: where the time of each worker went, stages, values between workers, and memory. They are HTML."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import median

from pippy.drivers.plan.language.instructions import Op
from pippy.drivers.report.activity import Cause, spent
from pippy.drivers.report.drawings import FILLS, LEGEND, css_class
from pippy.drivers.report.step_data import StepData
from pippy.ir.base.readable import bytes_text, duration, percent

WORDS = {Cause.WAITING: "for", Cause.TRANSFER: "from", Cause.SENDING: "to"}  # before the number of the other worker
CAUSE_MEANINGS = {
    Cause.COMPUTING: "a forward, a backward, or half a backward of a stage",
    Cause.STARTING: "the step had yet to reach the worker and to be unpacked",
    Cause.FILL: "before the worker's first computation, nothing was there to compute on",
    Cause.WAITING: "another worker had not begun to send the value that came next",
    Cause.TRANSFER: "the value was being sent, moved or unpacked",
    Cause.SENDING: "handing values over",
    Cause.ADDING: "adding up gradients, of values that several stages read or of replicated parameters; others' waited for",
    Cause.PYTHON: "freeing values, and what is done after the last instruction",
    Cause.DRAIN: "the worker was done, and others were not",
}


def report_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table of cells that are HTML; the first ``words`` columns are text, the others numbers.

    Every cell names its column: on a narrow page a row is a block of named cells, and the head is not shown.

    >>> report_table(["worker", "idle"], [["worker 0", tip("9 %", "3 ms")]])
    '<div class="wide"><table><thead><tr><th>worker</th><th class=n>idle</th></tr></thead><tbody><tr><td data-of="worker">\
worker 0</td><td class=n data-of="idle"><span title="3 ms" tabindex="0">9 %</span></td></tr></tbody></table></div>'
    """
    kinds = ["" if at < words else " class=n" for at in range(len(head))]
    begins = [f'<td{kind} data-of="{re.sub("<[^>]*>", "", each)}">' for kind, each in zip(kinds, head)]

    def row(cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"{begin}{cell}</td>" for begin, cell in zip(begins, cells, strict=True)) + "</tr>"

    heads = "".join(f"<th{kind}>{each}</th>" for kind, each in zip(kinds, head))
    body = "".join(map(row, rows))
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def tip(shown: str, words: str) -> str:
    """HTML that says more when it is pointed at, or has the focus."""
    return f'<span title="{escape(words)}" tabindex="0">{shown}</span>'


def bar(parts: Iterable[tuple[str, float, str]], whole: float, kind: str = "") -> str:
    """A bar of parts, each of a kind that has a colour, so wide of the ``whole``, with words for whoever points at it."""
    drawn = "".join(
        f'<i class="{css_class(each)}" title="{escape(words)}" '
        f'style="width:{100 * width / (whole or 1.0):.3f}%;background-color:{FILLS[each]}"></i>'
        for each, width, words in parts
        if width > 0
    )
    return f'<span class="bar{kind}">{drawn}</span>'


def times(step: StepData) -> str:
    """The share of each worker's time that each cause took. Seconds, other workers and predictions are in the tips."""
    by_worker = [spent(each) for each in step.activities]
    there = {cause for seconds in by_worker for cause, _ in seconds}
    causes = [cause for cause in Cause if cause in there]
    rows = []
    for worker, seconds in enumerate(by_worker):
        totals = [(cause, sum(each for (of, _), each in seconds.items() if of == cause)) for cause in causes]
        parts = [
            ("F" if cause == Cause.COMPUTING else cause, total, f"{cause}: {_share(total, step.makespan)}")
            for cause, total in totals
        ]
        name = f"{escape(step.named(worker))}{bar(parts, step.makespan)}"
        rows.append([name, _idle(step, worker), *(_spent(step, worker, each, seconds) for each in causes)])
    heads = [tip(escape(cause), CAUSE_MEANINGS[cause]) for cause in causes]
    return (
        f"<p>What each worker did in the {duration(step.makespan)} of the step. Point at a word for its meaning, at a share "
        "for its time and what was predicted: by a simulation of the program in which computations take their measured "
        "medians, and nothing else takes time.</p>"
    ) + report_table(["worker", tip("idle", "all but computing"), *heads], rows)


def _share(seconds: float, whole: float) -> str:
    return f"{duration(seconds)}, {percent(seconds / (whole or 1.0))}"


def _spent(step: StepData, worker: int, cause: Cause, seconds: Mapping[tuple[Cause, int | None], float]) -> str:
    by_peer = {peer: each for (of, peer), each in seconds.items() if of == cause}
    if not by_peer:
        return "–"
    total = sum(by_peer.values())
    lines = [f"{step.named(worker)}, {cause}: {duration(total)}"]
    lines += [f"{WORDS[cause]} worker {peer}: {duration(its)}" for peer, its in by_peer.items() if peer is not None]
    parts = step.predicted.idle_parts[worker]
    foreseen = {Cause.FILL: parts.fill, Cause.DRAIN: parts.drain, Cause.WAITING: sum(parts.waiting.values())}
    if cause in foreseen:
        lines.append(f"predicted: {duration(float(foreseen[cause]))}")
    return tip(percent(total / step.makespan), "\n".join(lines))


def _idle(step: StepData, worker: int) -> str:
    foreseen, idle = float(step.predicted.idle[worker]), step.idle[worker]
    words = f"{step.named(worker)}, idle: {duration(idle * step.makespan)}"
    predicted = f"predicted: {_share(foreseen, float(step.predicted.makespan))}"
    return tip(f"<b>{percent(idle)}</b>", f"{words}\n{predicted}")


def stages(step: StepData) -> str:
    """How long each pass of each stage takes."""
    kinds = [op for op in Op if any(step.medians[op])]
    totals, rows = step.stage_seconds, []
    for stage, total in enumerate(totals):
        mark = " <b>slowest</b>" if total == max(totals) and len(totals) > 1 else ""
        passes = [duration(step.medians[op][stage]) if step.medians[op][stage] else "–" for op in kinds]
        modules = f"<br><small>{escape(step.model.modules(stage))}</small>" if step.model.modules(stage) else ""
        name = f"stage {stage}{mark}{modules}{bar([('F', total, '')], max(totals))}"
        rows.append([name, escape(step.holders(stage)), *passes, duration(total)])
    head = ["stage", "on", *(escape(LEGEND[str(op)]) for op in kinds), "together"]
    return f"<p>For one micro-batch: medians over the {step.program.chunks}.</p>{report_table(head, rows, words=2)}"


def traffic(step: StepData) -> str:
    """The bytes of each value between workers, and how long it was on its way."""
    moves = step.traffic()
    if not moves:
        return "<p>No value went from worker to worker.</p>"
    took: dict[tuple[str, int, int], list[float]] = {}
    for worker, (order, activities) in enumerate(zip(step.program.orders, step.activities)):
        for each in activities:
            if each.cause == Cause.TRANSFER and each.at is not None:
                key = getattr(order[each.at], "value", ""), each.peer or 0, worker
                took.setdefault(key, []).append(each.duration)
    rows = []
    for moved in moves:
        times = took.get((moved.value, moved.source, moved.to))
        cells = [
            tip(escape(step.model.value(moved.value)), f"{moved.value}, as the program calls it"),
            " → ".join(f"<span class=w>{escape(step.named(each))}</span>" for each in (moved.source, moved.to)),
            str(moved.times),
            bytes_text(moved.bytes // moved.times),
            bytes_text(moved.bytes),
        ]
        rows.append([*cells, duration(median(times)) if times else "–"])
    hosts = [
        f"; {bytes_text(moved)} from host {one} to host {other}" for (one, other), moved in step.between_hosts().items()
    ]
    total = f"<p>{bytes_text(sum(each.bytes for each in moves))} in all{''.join(hosts)}.</p>"
    return total + report_table(["value", "edge", "times", "each", "together", "on its way (median)"], rows, words=2)


def memory_table(step: StepData) -> str:
    """The peak of each worker's memory, with the stages that it holds."""
    rows = [
        [
            escape(step.named(worker)),
            "<br>".join(escape(step.model.stage(stage)) for stage in step.stages_of(worker)),
            bytes_text(noted.memory),
            escape(noted.memory_of),
            str(step.program.peak_live[worker]),
        ]
        for worker, noted in enumerate(step.noted)
    ]
    head = ["worker", "holds", "peak", "of what", "micro-batches held"]
    note = (
        "<p>Resident is the whole process: Python and torch themselves, the parameters, gradients and optimizer states of its "
        "stages, and what is kept for backwards. What was freed stays resident for the next use. Micro-batches held counts, "
        "over the worker's stages, those between forward and backward, at most.</p>"
    )
    return report_table(head, rows, words=2) + note
