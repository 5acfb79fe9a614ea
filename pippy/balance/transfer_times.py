"""The time in which a stage takes values from other stages and sends its own, over links of a given speed.

    values that it takes   ──▶ stage ──▶   values that it sends
    their gradients        ◀──       ◀──   their gradients

Under 1F1B a stage waits for both: the micro-batch that it has just sent on comes back before it goes on. Values and gradients
have the same bytes, and move in opposite directions, which a link does at once. So a stage with the time of its own operations
takes longer by the time of all values that it takes or sends. Inputs of the model do not count: the controller sends them
ahead.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from pippy.balance.kept_bytes import UnitValue, merged_value, runs_that_take
from pippy.balance.run_table import Rectangle, RunTable
from pippy.ir.base.brief import brief
from pippy.ir.base.errors import BalanceError

MEASURED_LINK = "measured"  # in place of a speed: that between the workers of the current cluster
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SPEED = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(bit|b)(?:/s|ps)?\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """A link between two workers that moves so many bytes in a second. ``text`` is how it was given."""

    bytes_per_second: float
    text: str

    def nanoseconds(self, count: int) -> int:
        """How long it takes for some bytes.

        >>> link_of("8Gbit").nanoseconds(1000)
        1000
        """
        return round(count * 1e9 / self.bytes_per_second)


@dataclass(frozen=True, eq=False)
class TransferTimes(RunTable):
    """The nanoseconds in which each run of units takes and sends values. What several later runs use counts once as it is sent:
    how many there are is open.

    >>> transfers = TransferTimes(3, (UnitValue(0, (1, 2), 10), UnitValue(1, (2,), 7)), link_of("8Gbit"))
    >>> transfers.of(0, 1), transfers.of(1, 2), transfers.of(2, 3), transfers.of(0, 3)
    (10, 17, 17, 0)
    """

    units: int
    values: tuple[UnitValue, ...]
    link: Link

    def rectangles(self) -> Iterator[Rectangle]:
        """The runs that take each value, and those that send it."""
        for value in self.values:
            timed = replace(value, bytes=self.link.nanoseconds(value.bytes))
            yield from runs_that_take(timed)
            yield 0, timed.made, timed.made + 1, timed.users[-1], timed.bytes

    def merged(self, edges: Sequence[int]) -> "TransferTimes":
        """The same for larger units."""
        values = [merged_value(each, edges) for each in self.values]
        return TransferTimes(len(edges) - 1, tuple(each for each in values if each is not None), self.link)


def link_of(given: Any) -> Link:
    """The link that a text or a number of bytes per second stands for. A small b is a bit in "Gbit" and "Gb", a large B a byte.

    >>> link_of("10Gbit").bytes_per_second, link_of("1.25 GB/s").bytes_per_second, link_of(2**20).bytes_per_second
    (1250000000.0, 1250000000.0, 1048576.0)
    """
    speed = 0.0
    if isinstance(given, str) and (parts := _SPEED.fullmatch(given)):
        bits = parts[3] != "B"
        speed = float(parts[1]) * _PREFIXES[parts[2].lower()] / (8 if bits else 1)
    elif isinstance(given, int | float) and not isinstance(given, bool):
        speed = float(given)
    if not (isfinite(speed) and speed > 0):
        raise BalanceError(
            f'link={brief(given)} is no speed; give bits or bytes per second with a unit, as in link="10Gbit" or '
            'link="1.25GB/s", or a number of bytes per second, or link="measured" in a cluster'
        )
    return Link(speed, given if isinstance(given, str) else f"{given:g} B/s")
