"""Examples with one habit each, between two linear layers that are other stages: what is wrong with it is easy to read."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from exps.habits.changes import CHANGES, OPTIMIZERS
from exps.habits.example import LOSSES, PARTS, SCHEDULES, Example

BASE = Example(
    seed=1,
    parts=("linear", "linear", "linear"),
    cuts=(True, True, False),
    loss="squares",
    rows=(7, 7, 7),
    padding=("none", "some", "none"),
    chunks=3,
)
CHUNKS = (1, 3)
READING = ("reads: ", "hook reads: ", "function: ")  # which may be kept whole


def alone() -> Iterator[tuple[str, Example]]:
    """Each habit by its name, with one micro-batch and with three; schedules take turns."""
    for index, (name, changed) in enumerate((name, changed) for name, each in habits() for changed in each):
        yield name, replace(BASE, schedule=SCHEDULES[index % len(SCHEDULES)], **changed)


def habits() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for part in PARTS:
        wholes = ((), (False, True, False)) if part.startswith(READING) else ((),)
        yield (
            f"part {part}",
            [
                {"parts": ("linear", part, "linear"), "chunks": chunks, "whole": whole}
                for chunks in (CHUNKS if part != "batch norm" else (1,))
                for whole in wholes
            ],
        )
    for loss, each in LOSSES.items():
        tokens = 3 if each.tokens else 0
        yield (
            f"loss {loss}",
            [
                {"loss": loss, "chunks": chunks, "returns": returns, "tokens": tokens}
                for chunks in CHUNKS
                for returns in (None, "loss")
            ],
        )
    for change, needs in CHANGES.items():
        yield (
            f"change {change}",
            [
                {
                    "change": change,
                    "parts": ("linear", needs.part or "linear", "linear"),
                    "loss": needs.loss or "squares",
                    "optimizer": needs.optimizer or "sgd",
                    "chunks": chunks,
                }
                for chunks in CHUNKS
            ],
        )
    for optimizer in OPTIMIZERS:
        yield f"optimizer {optimizer}", [{"optimizer": optimizer, "chunks": chunks} for chunks in CHUNKS]
