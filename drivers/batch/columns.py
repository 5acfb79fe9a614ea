"""Inputs that workers load: on the controller a column is known by the indices of its rows alone.

controller    Column("image", batch 7: rows 5 1 4 2)      divide      LoadedColumn: no rows, and 2 + 2 are known
                                                         ─────────▶       │ with the step
worker        dataset[5], [1], [4], [2], collated ── divided as a given value ──▶ CutTensor: rows 5 1 · rows 4 2
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from pippy.drivers.base.errors import DriverError, MicrobatchError
from pippy.drivers.batch.division import DividedValue, Division, divided_leaves
from pippy.ir.base.readable import count_with_noun
from pippy.ir.call.guards import Guards
from pippy.ir.call.kinds import Elsewhere

ColumnKey = Hashable  # of a column in what a dataset gives: a number, a name, or None for all of it


@dataclass(frozen=True)
class IndexBatch:
    """Which rows a mini-batch has: their indices in the dataset with this number. ``draws`` is what random numbers of the
    dataset are keyed by. ``ahead`` are mini-batches that come next.

    >>> len(IndexBatch(0, [5, 1, 4], (0, 0, 7)))
    3
    """

    dataset: int
    indices: Sequence[Any]
    draws: tuple[int, ...]
    ahead: "tuple[IndexBatch, ...]" = ()

    def __len__(self) -> int:
        return len(self.indices)


class Column(Elsewhere):
    """One argument of a mini-batch whose rows the workers load. It is made by an `IndexLoader`, and given to `driver.run`.

    >>> Column(None, "x", IndexBatch(0, [5, 1, 4], ()))
    Column('x', 3 rows)
    """

    def __init__(self, dataset: Any, key: ColumnKey, batch: IndexBatch) -> None:
        self.dataset, self.key, self.batch = dataset, key, batch

    def __len__(self) -> int:
        return len(self.batch)

    def __repr__(self) -> str:
        return f"Column({self.key!r}, {count_with_noun(len(self), 'row')})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Column cannot be pickled: it stands for rows that the workers of one loader load. Pickle the "
            "indices, and make the Column again: loader.batch(indices)"
        )


class ColumnPieces(Column):
    """A column of several mini-batches that are run as one, each cut into as many micro-batches as ``counts`` says.

    >>> columns = [Column(None, "x", IndexBatch(0, range(rows), ())) for rows in (4, 3)]
    >>> ColumnPieces(columns, [2, 2]).sizes
    (2, 2, 2, 1)
    """

    def __init__(self, columns: Sequence[Column], counts: Sequence[int]) -> None:
        super().__init__(columns[0].dataset, columns[0].key, columns[0].batch)
        self.columns, self.counts = columns, tuple(counts)
        if any((each.dataset, each.key) != (self.dataset, self.key) for each in columns):
            raise MicrobatchError(
                "mini-batches that are run as one have columns of different datasets for the same argument, such "
                f"as {columns[0]!r}; take all of them from one loader"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each micro-batch, as `torch.tensor_split` cuts them."""
        return tuple(
            len(each) // count + (at < len(each) % count)
            for each, count in zip(self.columns, self.counts)
            for at in range(count)
        )

    def __len__(self) -> int:
        return sum(map(len, self.columns))


@dataclass(frozen=True)
class LoadingRules:
    """What a worker that loads inputs checks of them, and what it weighs losses by."""

    guards: Guards
    target: str | None
    loss_reduction: Callable[..., Any] | str | None


@dataclass(frozen=True, eq=False)
class LoadedColumn(DividedValue):
    """Stands for a value that a worker loads and divides: which column, its spec, and its path in the call.

    If it is of several mini-batches, ``counts`` says how many micro-batches each of them has.
    """

    key: ColumnKey
    batches: tuple[IndexBatch, ...]
    counts: tuple[int, ...]
    spec: Any
    path: str
    outer: bool

    def take(self, microbatch: int, division: Division) -> Any:
        raise DriverError(
            f"{self.path} is loaded by the workers, so its sizes are not known in this process; give a tensor. To "
            "count memory, a tensor on the meta device is enough"
        )


def loaded_columns(value: Any) -> list[LoadedColumn]:
    """What the workers load of a divided argument."""
    return [leaf for leaf in divided_leaves(value) if isinstance(leaf, LoadedColumn)]


@dataclass(frozen=True, eq=False)
class DivisionOfColumns(Division):
    """A mini-batch of which some values are loaded by the workers.

    ``checks_guards``: this worker checks what the Pipe was traced for. ``weighs``: this worker finds the weights of the losses.
    """

    checks_guards: bool = False
    weighs: bool = False

    def plain(self) -> Division:
        """The same, of which no value is loaded."""
        return Division(self.chunks, self.sizes, self.arguments, self.names, self.mask, self.starts, self.share)
