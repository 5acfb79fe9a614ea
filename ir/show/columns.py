"""The columns beside the boxes of a drawing. Each value has one, from the box that makes it to the last that uses it.

●       x is made: it takes the first free column
│ ●     y is made: it takes the second
▼ │     a box uses x; y passes by
  ▼     a box uses y
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from pippy.ir.show.structure import DrawnValue

T = TypeVar("T")


def columns_in_order(values: Sequence[DrawnValue]) -> dict[DrawnValue, int]:
    """The number of each value's column, in the order in which values are made. A column is free again where its value ends.

    >>> ways = {"a": (0, (1,)), "b": (0, (2,)), "c": (1, (2,))}
    >>> values = [DrawnValue(name, name, "value", *way) for name, way in ways.items()]
    >>> list(columns_in_order(values).values())
    [0, 1, 0]
    """
    until: list[int] = []
    columns: dict[DrawnValue, int] = {}
    for value in sorted(values, key=lambda value: value.source):
        free = (column for column, end in enumerate(until) if end <= value.source and end < last_use(value))
        column = next(free, len(until))
        until[column:] = [last_use(value), *until[column + 1 :]]
        columns[value] = column
    return columns


def last_use(value: DrawnValue) -> int:
    """The last box that uses a value; if none does, the box that makes it."""
    return max(value.users, default=value.source)


def columns_by_length(spans: Iterable[tuple[T, int, int]]) -> dict[T, int]:
    """The number of the column of each item with its start and end, so that none overlap: the shortest get the first columns.

    >>> columns_by_length([("long", 0, 3), ("short", 0, 1), ("later", 1, 2)])
    {'short': 0, 'later': 0, 'long': 1}
    """
    taken: list[list[tuple[int, int]]] = []
    columns: dict[T, int] = {}
    for item, start, end in sorted(spans, key=lambda span: span[2] - span[1]):
        fits = (
            column
            for column, others in enumerate(taken)
            if all(end <= first or last <= start for first, last in others)
        )
        columns[item] = next(fits, len(taken))
        if columns[item] == len(taken):
            taken.append([])
        taken[columns[item]].append((start, end))
    return columns
