"""Draws what each worker held over the time of a recorded step: measured, and beside it what was counted before."""

from collections.abc import Sequence
from html import escape

from pippy.drivers.recording.step_data import StepData
from pippy.drivers.recording.units import size
from pippy.drivers.schedules.simulation.held_bytes import HeldBytes

WIDTH, HEIGHT = 900, 90
MEASURED, COUNTED = "#3572b0", "#d9822b"


def memory_drawing(step: StepData, counted: Sequence[HeldBytes] | None) -> str:
    """A picture for each worker, as HTML; empty if nothing was measured."""
    return "".join(
        _of_worker(step, worker, most, counted[worker].most if counted else ())
        for worker, (most, _) in enumerate(step.held)
    )


def _of_worker(step: StepData, worker: int, measured: Sequence[int], counted: Sequence[int]) -> str:
    highest = max([*measured, *counted, 1])
    lines = [(MEASURED, "measured", measured), (COUNTED, "counted", counted)]
    drawn = "".join(
        f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{_points(step, worker, series, highest)}"/>'
        for color, _, series in lines
        if series
    )
    peaks = ", ".join(
        f'<span style="color:{color}">{name} {size(max(series))}</span>' for color, name, series in lines if series
    )
    return (
        f"<p>{escape(step.named(worker))}: at its peak {peaks}</p>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img">{drawn}</svg>'
    )


def _points(step: StepData, worker: int, series: Sequence[int], highest: int) -> str:
    """Steps: what was held while an instruction ran, from its beginning to its end."""
    record, points = step.records[worker], []
    ends = [*record.ends, record.ended]
    begin = record.started
    for end, held in sorted(zip(ends, series)):
        y = HEIGHT * (1 - held / highest)
        points += [f"{WIDTH * at / step.makespan:.1f},{y:.1f}" for at in (begin, end)]
        begin = end
    return " ".join(points)
