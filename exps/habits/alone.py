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
READING = ("reads: ", "hook reads: ", "function: ", "term: decay of", "grad: ")  # which may be kept whole


def alone() -> Iterator[tuple[str, Example]]:
    """Each habit by its name, with one micro-batch and with three; schedules take turns."""
    for index, (name, changed) in enumerate((name, changed) for name, each in habits() for changed in each):
        yield name, replace(BASE, schedule=SCHEDULES[index % len(SCHEDULES)], **changed)


def habits() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for part in PARTS:
        yield f"part {part}", list(of_part(part))
    for loss in LOSSES:
        yield f"loss {loss}", list(of_loss(loss))
    for change in CHANGES:
        yield f"change {change}", list(of_change(change))
    for optimizer in OPTIMIZERS:
        yield f"optimizer {optimizer}", [{"optimizer": optimizer, "chunks": chunks} for chunks in CHUNKS]


def of_part(part: str) -> Iterator[dict[str, Any]]:
    for chunks in CHUNKS if part != "batch norm" else (1,):
        for whole in (False, True) if part.startswith(READING) else (False,):
            yield {"parts": ("linear", part, "linear"), "chunks": chunks, "whole": (False, whole, False)}


def of_loss(loss: str) -> Iterator[dict[str, Any]]:
    tokens = 3 if LOSSES[loss].tokens else 0
    for chunks in CHUNKS:
        for returns in (None, "loss"):
            for given in (False, True) if chunks > 1 else (False,):
                yield {"loss": loss, "chunks": chunks, "returns": returns, "tokens": tokens, "example_given": given}


def of_change(change: str) -> Iterator[dict[str, Any]]:
    needs = CHANGES[change]
    changed = {
        "change": change,
        "parts": ("linear", needs.part or "linear", "linear"),
        "loss": needs.loss or "squares",
        "optimizer": needs.optimizer or "sgd",
    }
    for chunks in CHUNKS:
        for returns in (None, "loss") if needs.loss else (None,):
            yield {**changed, "chunks": chunks, "returns": returns}
