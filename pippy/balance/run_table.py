"""A number for each run of units, which depends on where the run begins and ends: a sum of rectangles in a table.

       first end ── last end
first start ┌─────────┐
            │ amount  │        all runs that begin and end in these places count the amount
last start  └─────────┘
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Self

import numpy as np

Table = np.ndarray[tuple[int, ...], np.dtype[np.int64]]  # a number for each run: by its start and its end
Rectangle = tuple[int, int, int, int, int]  # the first and last start of runs, the first and last end, and the amount

LAST = 1 << 60  # any end


class RunTable(ABC):
    """A number for each run of ``units`` units."""

    units: int

    @abstractmethod
    def rectangles(self) -> Iterable[Rectangle]:
        """What the numbers are made of."""

    @abstractmethod
    def merged(self, edges: Sequence[int]) -> Self:
        """The same for larger units: all units between two edges are one."""

    def always(self) -> list[int]:
        """What each unit counts in whichever run it is."""
        return [0] * self.units

    def without_always(self) -> Self:
        """The same without what `always` gives."""
        return self

    def of(self, start: int, end: int) -> int:
        """The number of the run from ``start`` to before ``end``."""
        return sum(
            amount
            for first, last, first_end, last_end, amount in self._rectangles
            if first <= start <= last and first_end <= end <= last_end
        )

    @cached_property
    def table(self) -> Table:
        """The numbers of all runs, by their start and their end."""
        return table_of(self.units, self._rectangles)

    @cached_property
    def _rectangles(self) -> list[Rectangle]:
        return list(self.rectangles())


def first_uses(users: Sequence[int], amount: int, start: int = 0) -> Iterator[Rectangle]:
    """The runs, from ``start`` on, that have one of these units; for each unit, the runs in which it is the first."""
    for user in users:
        if user >= start:
            yield start, user, user + 1, LAST, amount
            start = user + 1


def table_of(units: int, rectangles: Sequence[Rectangle]) -> Table:
    """The sum of rectangles for every run: by its start and its end."""
    size = units + 2
    rows, columns, amounts = list[int](), list[int](), list[int]()
    for first, last, first_end, last_end, amount in rectangles:
        corners = [(first, first_end, amount), (last + 1, first_end, -amount)]
        if last_end < units:
            corners += [(first, last_end + 1, -amount), (last + 1, last_end + 1, amount)]
        for row, column, each in corners:
            if row < size and column < size:
                rows.append(row)
                columns.append(column)
                amounts.append(each)
    table = np.zeros((size, size), dtype=np.int64)
    np.add.at(table, (np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64)), amounts)
    summed: Table = table.cumsum(0).cumsum(1)[: units + 1, : units + 1]
    return summed


def merged_numbers(numbers: Iterable[int], edges: Sequence[int]) -> tuple[int, ...]:
    """The numbers of larger units, each once: all units between two edges are one. Those outside stay outside.

    >>> merged_numbers([-1, 0, 2, 3, 9], edges=[0, 1, 4])
    (-1, 0, 1, 2)
    """
    count = len(edges) - 1
    found = {each if each < 0 else count if each >= edges[-1] else bisect_right(edges, each) - 1 for each in numbers}
    return tuple(sorted(found))
