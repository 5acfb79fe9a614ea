"""The steps of a recording as a strip of bars at the top of its report: a click on one shows it.

What the page says of the other steps is packed: a script unpacks the one that is asked for. So that a page stays small, not
every step is there: the step that is shown, the longest, the shortest, and the latest ones.
"""

from base64 import b64encode
from collections.abc import Callable, Sequence
from gzip import compress
from html import escape
from statistics import median

from pippy.drivers.report.step_data import StepData
from pippy.ir.base.readable import count_with_noun, duration

MOST_STEPS = 12
MOST_INSTRUCTIONS = 10_000  # of all steps together that are packed


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
