"""Reads data item by item, and knows its position, so that a resumed run reads the same items.

    position    epoch 2, 5 items taken, the random numbers as they were when epoch 2 began
    go to it    these random numbers ──▶ iter(data) ──▶ 5 items are read and dropped ──▶ the random numbers as they were

So a DataLoader that shuffles gives the same items again, with workers of its own and without, although it has no position. Data
with ``state_dict()`` and ``load_state_dict()`` has one: then this is used, and nothing is read twice.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.files.manifest import random_state, random_values
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.trees import describe
from pippy.ir.run.random_state import RandomState


@dataclass(frozen=True)
class DataPosition:
    """A position, and the random numbers there."""

    position: dict[str, Any]
    random: RandomState


class Reader:
    """Reads ``data`` epoch after epoch. ``ended`` says that the data is an iterator, and at its end.

    >>> reader = Reader([1, 2, 3])
    >>> reader.take(2), reader.take(2), reader.take(2), reader.take(2)
    ([1, 2], [3], [], [1, 2])
    >>> reader.epoch, reader.taken
    (1, 2)
    """

    def __init__(self, data: Iterable[Any], name: str = "data") -> None:
        check_data(data, name)
        self.data, self.name = data, name
        self.epoch = self.taken = 0
        self.ended = False
        self._iterator: Iterator[Any] | None = None
        self._begin: dict[str, Any] | None = None  # the random numbers when the epoch began
        self._unread: dict[str, Any] | None = None

    @property
    def reads_once(self) -> bool:
        """Whether it cannot be read a second time."""
        return isinstance(self.data, Iterator) and not self._has_state

    @property
    def _has_state(self) -> bool:
        return hasattr(self.data, "state_dict") and hasattr(self.data, "load_state_dict")

    def take(self, count: int) -> list[Any]:
        """Up to ``count`` items of this epoch. At its end, an empty list; then the next epoch begins."""
        if self._iterator is None:
            self._open()
        items: list[Any] = []
        assert self._iterator is not None
        while len(items) < count:
            try:
                items.append(next(self._iterator))
            except StopIteration:
                break
            self.taken += 1
        if not items:
            self._end_epoch()
        return items

    def _open(self) -> None:
        for part in _parts(self.data):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        self._begin = self._now()
        self._iterator = iter(self.data)

    def _now(self) -> dict[str, Any]:
        return {
            "random": random_values(RandomState.current()),
            "generators": [each.get_state() for each in generators_of_data(self.data)],
        }

    def _end_epoch(self) -> None:
        if not self.taken:
            raise DriverError(f"{self.name} gave no mini-batch in epoch {self.epoch}; is it empty, or read already?")
        self.ended = self.reads_once
        self.epoch, self.taken, self._iterator, self._begin = self.epoch + 1, 0, None, None

    def position(self) -> dict[str, Any]:
        """The position, as plain values."""
        if self._unread is not None:
            return self._unread
        if self._has_state:
            return {"epoch": self.epoch, "taken": self.taken, "state": self.data.state_dict()}  # type: ignore[attr-defined]
        return {"epoch": self.epoch, "taken": self.taken, "begin": self._begin or self._now()}

    def place(self) -> "DataPosition":
        """The position now, for `go_back`."""
        return DataPosition(self.position(), RandomState.current())

    def go_back(self, place: "DataPosition") -> None:
        """Go back to a position and its random numbers, as the items read since are not used. After this it reads no more."""
        self._unread = place.position
        place.random.restore()

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Go to the position of another reader of the same data. The random numbers do not change."""
        now = RandomState.current()
        self.epoch, self.taken, self._iterator, self._begin = position["epoch"], 0, None, None
        self._unread = None
        self.ended = self.reads_once and self.epoch > 0
        if "state" in position and self._has_state:
            self.data.load_state_dict(position["state"])  # type: ignore[attr-defined]
            self.taken = position["taken"]
        elif "state" in position or self._has_state:
            has, had = ("has", "had none") if self._has_state else ("has none", "had one")
            raise DriverError(
                f"{self.name} {has} a state_dict(), and what the checkpoint was saved with {had}; give data of the same kind"
            )
        else:
            for generator, state in zip(generators_of_data(self.data), position["begin"]["generators"]):
                generator.set_state(state)
            if position["taken"]:
                random_state(position["begin"]["random"]).restore()
                self._skip(position["taken"])
        now.restore()

    def _skip(self, count: int) -> None:
        self._open()
        while self.taken < count and (items := self.take(1)):
            del items
        if self.taken < count:
            raise DriverError(
                f"{self.name} ended before its item {count}, to which the run had come; give the data that it had"
            )


def check_data(data: Any, name: str) -> None:
    """Raise unless this can be iterated over, and is no single mini-batch."""
    if isinstance(data, (torch.Tensor, str, bytes, Mapping)) or not hasattr(data, "__iter__"):
        raise DriverError(
            f"{name}={describe(data)}: give something that gives one mini-batch after the other, as a DataLoader or a list; "
            "one mini-batch alone is [batch]"
        )


def may_read_ahead(driver: PipelineDriverBase) -> bool:
    """Whether data may be read while a step runs: not if this process has stages.

    Stages draw random numbers, and the data may draw from the same generators.
    """
    return all(driver.cluster.session.workers[rank].pid != os.getpid() for rank in driver.ranks)


def _parts(data: Any) -> Iterator[Any]:
    """The data, and the parts of a DataLoader."""
    if data is not None:
        yield data
    for name in ("dataset", "batch_sampler", "sampler"):
        part = getattr(data, name, None)
        if part is not None:
            yield from _parts(part)


def generators_of_data(data: Any) -> list[torch.Generator]:
    """The generators that the data draws from, without that of the process."""
    found = {
        id(own): own for part in _parts(data) if isinstance(own := getattr(part, "generator", None), torch.Generator)
    }
    return [each for each in found.values() if each is not torch.default_generator]


# An iterator over data that has no end, for loops that take one item after the other.


@placing_words()
class RepeatingLoader(Iterator[Any]):
    """An iterator over data that begins anew at its end, as DeepSpeed's. Its position can be saved.

    ``driver.save(folder, data=loader, ...)`` saves how far it was read, and ``driver.load(folder, data=loader, ...)`` has
    another one of the same data go on from there. See docs/loop.md for which data that works.

    >>> loader = RepeatingLoader([1, 2, 3])
    >>> [next(loader) for _ in range(5)], loader.epoch
    ([1, 2, 3, 1, 2], 1)
    >>> other = RepeatingLoader([1, 2, 3])
    >>> other.load_state_dict(loader.state_dict())
    >>> next(other)
    3
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._reader = Reader(data)

    @property
    def epoch(self) -> int:
        """How often the data was begun again."""
        return self._reader.epoch

    def __next__(self) -> Any:
        """The next item. It ends only if the data is an iterator, which cannot be read again."""
        while not self._reader.ended:
            for item in self._reader.take(1):
                return item
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """Its position, as plain values."""
        return self._reader.position()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of another loader. Random numbers do not change."""
        self._reader.go_to(state)
