"""Items of a dataset as torch has it: `dataset[index]`, or `dataset.__getitems__(indices)`, put together by a collate function.

A `TensorDataset` and a `StackDataset` are made of a dataset for each column. So a worker has, and loads, those that it needs.
"""

import os
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, StackDataset, TensorDataset, default_collate

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.trees import describe

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
