"""Makes an example simpler for as long as the verdict on it stays: of what is left, each word bears on it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from exps.habits.changes import CHANGES
from exps.habits.example import LOSSES, Example

SIMPLEST: dict[str, Any] = {
    "change": None,
    "optimizer": "sgd",
    "replicas": 1,
    "checkpoint": "never",
    "single_loss": False,
    "late_hooks": False,
    "example_given": False,
    "reduction": "omitted",
    "schedule": "fill_drain",
    "config": "TRANSMIT",
    "chunks": 2,
    "padding": ("none",) * 3,
    "rows": (6, 6, 6),
    "returns": None,
    "loss": "squares",
    "tokens": 0,
}


def simpler(example: Example) -> Iterator[Example]:
    """Examples with one thing less."""
    for index in range(len(example.parts)):
        yield replace(
            example,
            parts=without(example.parts, index),
            cuts=without(example.cuts, index),
            whole=without(example.whole, index),
        )
    for name, value in SIMPLEST.items():
        if getattr(example, name) != value:
            yield replace(example, **{name: value})
    for index in range(len(example.parts)):
        if example.cuts[index]:
            yield replace(example, cuts=changed(example.cuts, index, False))
        if example.whole[index]:
            yield replace(example, whole=changed(example.whole, index, False))
        if example.parts[index] != "linear":
            yield replace(example, parts=changed(example.parts, index, "linear"))


def without(values: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return values[:index] + values[index + 1 :]


def changed(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def is_possible(example: Example) -> bool:
    """Whether the loss takes such values, and the script finds what it changes."""
    needs = CHANGES[example.change] if example.change else None
    if LOSSES[example.loss].tokens not in (None, bool(example.tokens)):
        return False
    if example.change is None:
        return True
    needs = CHANGES[example.change]
    found = ((needs.part, example.parts), (needs.loss, (example.loss,)), (needs.optimizer, (example.optimizer,)))
    return all(need is None or need in given for need, given in found)


def simplest(example: Example, still: Callable[[Example], bool]) -> Example:
    """The simplest example found for which this still holds."""
    while True:
        for each in simpler(example):
            if is_possible(each) and still(each):
                example = each
                break
        else:
            return example
