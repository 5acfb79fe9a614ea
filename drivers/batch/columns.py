"""Inputs that workers load: on the controller a column is known by the indices of its rows alone.

controller    Column("image", batch 7: rows 5 1 4 2)      divide      LoadedColumn: no rows, and 2 + 2 are known
                                                         ─────────▶       │ with the step
worker        dataset[5], [1], [4], [2], collated ── divided as a given value ──▶ CutTensor: rows 5 1 · rows 4 2
"""

import os
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, StackDataset, TensorDataset, default_collate

from pippy.drivers.base.errors import DriverError, MicrobatchError
from pippy.drivers.batch.division import DividedValue, Division, divided_leaves, even_sizes
from pippy.ir.base.readable import count_with_noun
from pippy.ir.base.trees import describe
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

    Several mini-batches that are run as one have a batch each, cut into as many micro-batches as ``counts`` says.

    >>> Column(None, "x", [IndexBatch(0, [5, 1, 4], ())])
    Column('x', 3 rows)
    >>> Column(None, "x", [IndexBatch(0, range(rows), ()) for rows in (4, 3)], counts=[2, 2]).sizes
    (2, 2, 2, 1)
    """

    def __init__(self, dataset: Any, key: ColumnKey, batches: Sequence[IndexBatch], counts: Sequence[int] = ()) -> None:
        self.dataset, self.key, self.batches, self.counts = dataset, key, tuple(batches), tuple(counts)

    @property
    def batch(self) -> IndexBatch:
        """The mini-batch; the first one, of several that are run as one."""
        return self.batches[0]

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def __repr__(self) -> str:
        return f"Column({self.key!r}, {count_with_noun(len(self), 'row')})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Column cannot be pickled: it stands for rows that the workers of one loader load. Pickle the "
            "indices, and make the Column again: loader.batch(indices)"
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each micro-batch of several mini-batches, as `torch.tensor_split` cuts them."""
        return tuple(size for each, count in zip(self.batches, self.counts) for size in even_sizes(len(each), count))


def joined_columns(columns: Sequence[Column], counts: Sequence[int]) -> Column:
    """A column of several mini-batches that are run as one."""
    first = columns[0]
    if any((each.dataset, each.key) != (first.dataset, first.key) for each in columns):
        raise MicrobatchError(
            "mini-batches that are run as one have columns of different datasets for the same argument, such "
            f"as {first!r}; take all of them from one loader"
        )
    return Column(first.dataset, first.key, [batch for each in columns for batch in each.batches], counts)


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
    loaded = True

    def take(self, microbatch: int, division: Division) -> Any:
        raise DriverError(
            f"{self.path} is loaded by the workers, so its sizes are not known in this process; give a tensor. To "
            "count memory, a tensor on the meta device is enough"
        )


def loaded_columns(value: Any) -> list[LoadedColumn]:
    """What the workers load of a divided argument."""
    return [leaf for leaf in divided_leaves(value) if isinstance(leaf, LoadedColumn)]


# Items of a dataset as torch has it: `dataset[index]`, or `dataset.__getitems__(indices)`, put together by a collate function.
#
# A `TensorDataset` and a `StackDataset` are made of a dataset for each column. So a worker has, and loads, those that it needs.


_SHOWN = 8  # indices in an error


def check_dataset(dataset: Any, what: str) -> None:
    """Raise unless rows can be asked for by their indices."""
    methods = {each for each in ("__getitem__", "__getitems__") if callable(getattr(dataset, each, None))}
    if isinstance(dataset, Dataset) and type(dataset).__getitem__ is Dataset.__getitem__:
        methods.discard("__getitem__")
    if isinstance(dataset, (IterableDataset, type)) or not methods:
        raise DriverError(
            f"{what} is {describe(dataset)}, which cannot be indexed: it has neither __getitem__ nor __getitems__; "
            "give a dataset that has one of them, or run tensors: driver.run(chunks, x, target)"
        )


def columns_of(dataset: Any) -> dict[Hashable, Any] | None:
    """The datasets of the columns that a dataset is made of; None if it gives whole rows only.

    >>> columns_of(TensorDataset(torch.zeros(2), torch.ones(2)))
    {0: tensor([0., 0.]), 1: tensor([1., 1.])}
    """
    if type(dataset) is TensorDataset:
        return dict(enumerate(dataset.tensors))
    if type(dataset) is StackDataset:
        return dict(dataset.datasets if isinstance(dataset.datasets, dict) else enumerate(dataset.datasets))
    return None


def load_rows(
    dataset: Any, indices: Sequence[Any], collate: Callable[[Any], Any] | None, goes_on: Callable[[], None]
) -> Any:
    """The rows with these indices, put together. ``goes_on`` is called between them, and may raise.

    >>> load_rows([(1, 2.0), (3, 4.0)], [1, 0, 1], None, lambda: None)
    [tensor([3, 1, 3]), tensor([4., 2., 4.], dtype=torch.float64)]
    """
    if isinstance(dataset, torch.Tensor) and collate is None and dataset.dim() and dataset.layout is torch.strided:
        return _explained(lambda: dataset[list(indices)], f"the tensor of {len(dataset)} rows", indices)
    if callable(getattr(dataset, "__getitems__", None)):
        items = _explained(lambda: dataset.__getitems__(list(indices)), "dataset.__getitems__", indices)
        if len(items) != len(indices):
            raise DriverError(
                f"dataset.__getitems__ returned {len(items)} rows for {len(indices)} indices; it must return one "
                "row for each index, in order"
            )
    else:
        items = []
        for index in indices:
            goes_on()
            items.append(_explained(partial(getitem, dataset, index), "dataset", [index]))
    goes_on()
    return _explained(lambda: (collate or default_collate)(items), "the collate function", indices)


def column_of(rows: Any, key: Hashable, alone: bool) -> Any:
    """One column of rows that were put together. ``alone``: no other is asked for, and it may be all that there is."""
    if key is None:
        return rows
    try:
        if isinstance(rows, (tuple, list, Mapping)):
            return rows[key]  # type: ignore[call-overload]
    except (KeyError, IndexError, TypeError):
        pass
    else:
        if alone and key == 0:
            return rows
    raise DriverError(
        f"the dataset returns {describe(rows)}, which has no column {key!r}; name the columns that it has: "
        "IndexLoader(..., columns=2) or columns=('name', 'other')"
    )


def _explained(load: Callable[[], Any], what: str, indices: Sequence[Any]) -> Any:
    """Call what is the user's. An error says for which indices, and in which line."""
    try:
        return load()
    except Exception as error:
        shown = ", ".join(map(repr, indices[:_SHOWN])) + (", ..." if len(indices) > _SHOWN else "")
        asked = f"{what}[{shown}]" if len(indices) == 1 else f"{what} for the indices {shown}"
        raise DriverError(f"{asked} raised {type(error).__name__}: {error}{_line_of(error)}") from error


def _line_of(error: BaseException) -> str:
    """The line of the user's code that raised, if it was Python code."""
    torchs = os.path.dirname(torch.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    users = [frame for frame in frames if not frame.filename.startswith(torchs)] or frames
    if not users:
        return ""
    return f"\n  {users[-1].filename}:{users[-1].lineno}, in {users[-1].name}: {users[-1].line}"
