"""The bytes that a stage keeps of a micro-batch until its backward. They depend on where the stage begins and ends.

    x ──▶ a ──▶ b ──▶ c ──▶     a, b and c are units, and what is between them are values

A stage keeps, each storage once:

- what autograd saves of the storages that its own units make;
- the values that it takes from other stages, whether autograd saves them or not. They arrive in memory of their own. So if its
  units save a storage that such a value was a part of, this storage is not counted again.

So a value that crosses a cut is kept behind it, and perhaps not at all if both sides are one stage. Values that go to other
stages are freed when they were sent.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

Table = np.ndarray[tuple[int, ...], np.dtype[np.int64]]  # a number for each run: by its start and its end
Rectangle = tuple[
    int, int, int, int, int
]  # the first and last start of runs, the first and last end, and how much they keep


@dataclass(frozen=True)
class UnitValue:
    """A value: the unit that makes it, the units that use it, in their order, and its bytes.

    Inputs of the model are made by unit -1. What the model returns is used by a unit after the last one.
    """

    made: int
    users: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Storage:
    """A piece of memory: the unit that makes it, its bytes, the units that save it for backwards, and the values in it."""

    made: int
    bytes: int
    saved: tuple[int, ...] = ()
    values: tuple[UnitValue, ...] = ()


@dataclass(frozen=True, eq=False)
class KeptBytes:
    """The bytes that each run of units keeps of a micro-batch.

    >>> wide = Storage(0, 100, (), (UnitValue(0, (1,), 100),))  # made by unit 0, used by unit 1, saved by none
    >>> kept = KeptBytes(3, (wide, Storage(1, 7, (2,), (UnitValue(1, (2,), 7),))))
    >>> kept.of(0, 1), kept.of(1, 3), kept.of(0, 3), int(kept.table[1, 2])
    (0, 107, 7, 100)
    """

    units: int
    storages: tuple[Storage, ...]

    def of(self, start: int, end: int) -> int:
        """The bytes that the units from ``start`` to before ``end`` keep."""
        return sum(
            amount
            for first, last, first_end, last_end, amount in self._rectangles
            if first <= start <= last and first_end <= end <= last_end
        )

    @cached_property
    def table(self) -> Table:
        """The bytes that all runs keep, by their start and their end."""
        return table_of(self.units, self._rectangles)

    def always(self) -> list[int]:
        """The bytes that each unit keeps in whichever stage it is: those of storages that it makes and saves itself."""
        found = [0] * self.units
        for each in self.storages:
            if each.made in each.saved:
                found[each.made] += each.bytes
        return found

    def merged(self, edges: Sequence[int]) -> "KeptBytes":
        """The same for larger units: all units between two edges are one."""
        count = len(edges) - 1

        def unit(number: int) -> int:
            return number if number < 0 else count if number >= edges[-1] else bisect_right(edges, number) - 1

        return KeptBytes(count, tuple(_renumbered(each, unit) for each in self.storages))

    def without_always(self) -> "KeptBytes":
        """The same without the bytes of `always`."""
        return KeptBytes(
            self.units,
            tuple(replace(each, bytes=0) if each.made in each.saved else each for each in self.storages),
        )

    @cached_property
    def _rectangles(self) -> list[Rectangle]:
        return [
            each for storage in self.storages for each in (*_made_inside(storage, self.units), *_taken(storage.values))
        ]


def _made_inside(storage: Storage, units: int) -> Iterator[Rectangle]:
    """The runs that make a storage and save it."""
    if storage.made >= 0 and storage.bytes and storage.saved:
        yield 0, storage.made, storage.saved[0] + 1, units, storage.bytes


def _taken(values: Sequence[UnitValue]) -> Iterator[Rectangle]:
    """The runs that take values which earlier units make."""
    for value in values:
        yield from first_uses(value.users, value.bytes, value.made + 1)


def first_uses(users: Sequence[int], amount: int, start: int = 0) -> Iterator[Rectangle]:
    """The runs, from ``start`` on, that have one of these units; for each unit, the runs in which it is the first."""
    for user in users:
        if user >= start:
            yield start, user, user + 1, LAST, amount
            start = user + 1


LAST = 1 << 60  # any end


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


def _renumbered(storage: Storage, unit: Callable[[int], int]) -> Storage:
    values = [replace(each, made=unit(each.made), users=_each_once(each.users, unit)) for each in storage.values]
    crossing = tuple(each for each in values if each.users and each.users[-1] > each.made)
    return Storage(unit(storage.made), storage.bytes, _each_once(storage.saved, unit), crossing)


def _each_once(numbers: Sequence[int], unit: Callable[[int], int]) -> tuple[int, ...]:
    return tuple(sorted(set(map(unit, numbers))))
