"""Draws what each worker held over the time of a recorded step: measured, and beside it what was counted before."""

from collections.abc import Iterator, Sequence
from html import escape

from pippy.drivers.plan.cost.held_bytes import HeldBytes
from pippy.drivers.report.step_data import StepData
from pippy.ir.base.readable import bytes_text, duration

MEMORY_WIDTH, HEIGHT = 900, 80
Series = tuple[str, Sequence[int]]  # "measured" or "counted", and the most bytes held while each instruction ran
HOW = (
    "<p>For memory over time, record with <code>driver.record(memory=True)</code>; "
    "<code>recording.report(path, memory=driver.memory(...))</code> draws what was counted before beside it.</p>"
)


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
