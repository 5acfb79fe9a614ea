"""The bytes that a stage keeps of a micro-batch until its backward. They depend on where the stage begins and ends.

    x ──▶ a ──▶ b ──▶ c ──▶     a, b and c are units, and what is between them are values

A stage keeps, each storage once:

- what autograd saves of the storages that its own units make;
- the values that it takes from other stages, whether autograd saves them or not. They arrive in memory of their own. So if its
  units save a storage that such a value was a part of, this storage is not counted again.

So a value that crosses a cut is kept behind it, and perhaps not at all if both sides are one stage. Values that go to other
stages are freed when they were sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pippy.balance.run_table import Rectangle, RunTable, first_uses, merged_numbers


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
class KeptBytes(RunTable):
    """The bytes that each run of units keeps of a micro-batch.

    >>> wide = Storage(0, 100, (), (UnitValue(0, (1,), 100),))  # made by unit 0, used by unit 1, saved by none
    >>> kept = KeptBytes(3, (wide, Storage(1, 7, (2,), (UnitValue(1, (2,), 7),))))
    >>> kept.of(0, 1), kept.of(1, 3), kept.of(0, 3), int(kept.table[1, 2])
    (0, 107, 7, 100)
    """

    units: int
    storages: tuple[Storage, ...]

    def always(self) -> list[int]:
        """The bytes that each unit keeps in whichever stage it is: those of storages that it makes and saves itself."""
        found = [0] * self.units
        for each in self.storages:
            if each.made in each.saved:
                found[each.made] += each.bytes
        return found

    def merged(self, edges: Sequence[int]) -> "KeptBytes":
        """The same for larger units: all units between two edges are one."""
        return KeptBytes(len(edges) - 1, tuple(_renumbered(each, edges) for each in self.storages))

    def without_always(self) -> "KeptBytes":
        """The same without the bytes of `always`."""
        return KeptBytes(
            self.units,
            tuple(replace(each, bytes=0) if each.made in each.saved else each for each in self.storages),
        )

    def rectangles(self) -> Iterator[Rectangle]:
        """The runs that keep each storage."""
        for storage in self.storages:
            yield from _made_inside(storage, self.units)
            for value in storage.values:
                yield from runs_that_take(value)


def _made_inside(storage: Storage, units: int) -> Iterator[Rectangle]:
    """The runs that make a storage and save it."""
    if storage.made >= 0 and storage.bytes and storage.saved:
        yield 0, storage.made, storage.saved[0] + 1, units, storage.bytes


def runs_that_take(value: UnitValue) -> Iterator[Rectangle]:
    """The runs that take a value which an earlier unit makes."""
    return first_uses(value.users, value.bytes, value.made + 1)


def merged_value(value: UnitValue, edges: Sequence[int]) -> UnitValue | None:
    """The value of larger units; None if no other unit uses it."""
    (made,), users = merged_numbers([value.made], edges), merged_numbers(value.users, edges)
    return UnitValue(made, users, value.bytes) if users and users[-1] > made else None


def _renumbered(storage: Storage, edges: Sequence[int]) -> Storage:
    (made,), saved = merged_numbers([storage.made], edges), merged_numbers(storage.saved, edges)
    values = [merged_value(each, edges) for each in storage.values]
    return Storage(made, storage.bytes, saved, tuple(each for each in values if each is not None))
