"""Room for values on their way: each gets a lane from the box that makes it to the last that uses it.

●       x is made: it takes the first free lane
│ ●     y is made beside it
▼ │     a box that uses x, and not y: y passes by
  ▼
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from pippy.ir.show.flow import Value

T = TypeVar("T")


def assign_lanes(values: Sequence[Value]) -> dict[Value, int]:
    """A lane for each value, by number. Two values on one lane never meet, but where one ends the next may begin.

    >>> values = [Value(name, name, "value", *way) for name, way in {"a": (0, (1,)), "b": (0, (2,)), "c": (1, (2,))}.items()]
    >>> list(assign_lanes(values).values())
    [0, 1, 0]
    """
    until: list[int] = []
    lanes: dict[Value, int] = {}
    for value in sorted(values, key=lambda value: value.source):
        free = (lane for lane, end in enumerate(until) if end <= value.source and end < last_use(value))
        lane = next(free, len(until))
        until[lane:] = [last_use(value), *until[lane + 1 :]]
        lanes[value] = lane
    return lanes


def last_use(value: Value) -> int:
    """The last box on a value's way; the one that makes it where none uses it."""
    return max(value.users, default=value.source)


def stacked(spans: Iterable[tuple[T, int, int]]) -> dict[T, int]:
    """A lane for each span, given by its start and end, so that none overlap: the short ones on the first lanes.

    >>> stacked([("long", 0, 3), ("short", 0, 1), ("later", 1, 2)])
    {'short': 0, 'later': 0, 'long': 1}
    """
    taken: list[list[tuple[int, int]]] = []
    lanes: dict[T, int] = {}
    for item, start, end in sorted(spans, key=lambda span: span[2] - span[1]):
        fits = (
            lane for lane, others in enumerate(taken) if all(end <= first or last <= start for first, last in others)
        )
        lanes[item] = next(fits, len(taken))
        if lanes[item] == len(taken):
            taken.append([])
        taken[lanes[item]].append((start, end))
    return lanes
