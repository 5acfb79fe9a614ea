"""The result of balancing: a row for each stage, and how far the heaviest is from the lower bound."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from pippy.ir.base.readable import bytes_text, count_text, shortened, text_table

LONGEST_NAME = 24
_HEADS = ["stage", "from", "to", "layers", "share", "parameters", "memory", "sends on", "peak"]
_NAMES = 3  # the first columns hold names, the others numbers
_COST = 4  # the column of the costs, before that of the shares


def milliseconds(nanoseconds: int) -> str:
    """A time in milliseconds, as text.

    >>> milliseconds(1_234_567), milliseconds(45_600)
    ('1.23 ms', '0.046 ms')
    """
    value = nanoseconds / 1e6
    return f"{value:,.2f} ms" if value >= 1 else f"{value:.3f} ms"


COST_TEXT: dict[str, Callable[[int], str]] = {
    "layers": str,
    "matches": str,
    "parameters": count_text,
    "time": milliseconds,
    "memory": bytes_text,
}


@dataclass(frozen=True)
class StageBalance:
    """One stage: its layers, its cost in the measure of the balance, and the bytes that it holds and sends.

    ``sends`` are the bytes that cross the cut behind it for one micro-batch, with those of skips to later stages. It is None
    for the last stage, and without example arguments. ``memory`` are about the bytes that it holds between computations,
    ``peak`` the most that it holds; None if stages are not cut by memory. ``forward`` is the part of its forward in a cost that
    is a time.
    """

    name: str
    first: str
    last: str
    layers: int
    cost: int
    parameters: int
    memory: int
    sends: int | None
    peak: int | None = None
    forward: int | None = None


@dataclass(frozen=True)
class Balance:
    """How a model was cut, and how even the stages are. Print it.

    ``measure`` says what the costs are: layers, matches, parameters, time (nanoseconds) or memory (bytes). ``bound`` is the
    lowest cost that the heaviest stage can have: the mean, or the cost of the one layer that ``alone`` names. ``optimal``
    says that, under the given limits, no other cuts have a heaviest stage that is lighter by more than ``within`` of its cost:
    3 %, or more if measured times may be wrong by more. It is False for cuts by hand, and for those by counted memory.

    >>> stages = (StageBalance("submod_0", "a", "b", 2, 30, 30, 120, 64), StageBalance("submod_1", "c", "c", 1, 20, 20, 80, None))
    >>> balance = Balance("parameters", "parameters", stages, 25, None, True, "parameters once")
    >>> balance.ratio
    1.2
    """  # noqa: E501

    policy: str
    measure: str
    stages: tuple[StageBalance, ...]
    bound: int
    alone: str | None
    optimal: bool
    memory_note: str
    within: float = 0.03

    @property
    def greatest(self) -> StageBalance:
        """The stage with the greatest cost."""
        return max(self.stages, key=lambda stage: stage.cost)

    @property
    def mean(self) -> float:
        """The mean cost of the stages."""
        return sum(stage.cost for stage in self.stages) / len(self.stages)

    @property
    def ratio(self) -> float:
        """The greatest cost over the mean: 1 is perfect."""
        return self.greatest.cost / self.mean if self.mean else 1.0

    def seconds(self) -> list[tuple[float, float]] | None:
        """The measured forward and backward of each stage, for the example; None if no times of both were measured.

        >>> stages = (StageBalance("submod_0", "a", "b", 2, 30_000_000, 30, 120, None, forward=10_000_000),)
        >>> Balance("time", "time", stages, 25, None, True, "").seconds()
        [(0.01, 0.02)]
        """
        found = [
            (each.forward / 1e9, (each.cost - each.forward) / 1e9) for each in self.stages if each.forward is not None
        ]
        trained = self.measure == "time" and any(backward for _, backward in found)
        return found if trained else None

    def summary(self) -> str:
        """A sentence that says how uneven the stages are, and how even they could be."""
        if len(self.stages) == 1:
            return f"by {self.policy}: one stage"
        bound = self.bound / self.mean if self.mean else 1.0
        why = f"{self.alone} alone" if self.alone else "the mean"
        return (
            f"by {self.policy}: the greatest stage, {self.greatest.name}, is {self.ratio:.2f} times the mean; the bound is "
            f"{bound:.2f} ({why})"
            + (f"; no other cut does {ceil(round(self.within * 100, 6))} % better" if self.optimal else "")
            + "; cut by hand" * (self.policy == "hand")
        )

    def __str__(self) -> str:
        columns = list(zip(self._heads(), *(self._cells(stage) for stage in self.stages)))
        # One measure is no column twice, and a column that knows nothing is none.
        shown = [i for i, column in enumerate(columns) if any(column[1:]) and not (i == _COST and column[0] in _HEADS)]
        rows = [[columns[i][row] for i in shown] for row in range(len(self.stages) + 1)]
        table = text_table(rows[0], rows[1:], words=range(_NAMES))
        return "\n".join(filter(None, [table, self.summary(), self.memory_note]))

    def _heads(self) -> list[str]:
        return [*_HEADS[:_COST], self.measure, *_HEADS[_COST:]]

    def _cells(self, stage: StageBalance) -> list[str]:
        total = sum(each.cost for each in self.stages)
        return [
            stage.name,
            shortened(stage.first, LONGEST_NAME),
            shortened(stage.last, LONGEST_NAME),
            str(stage.layers),
            COST_TEXT[self.measure](stage.cost),
            f"{stage.cost / total:.0%}" if total else "",
            count_text(stage.parameters),
            bytes_text(stage.memory),
            "" if stage.sends is None else bytes_text(stage.sends),
            "" if stage.peak is None else bytes_text(stage.peak),
        ]
