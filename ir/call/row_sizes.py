"""How values that go from stage to stage depend on the number of rows of a batch: sizes, and the shapes of tensors.

forward                             for 4 rows      for 5 rows      found
──────────────────────────────────────────────────────────────────────────────────────
n = x.shape[0]                      4               5               RowSize(1)
shape = h.flatten(0, 1).shape       (20, 16)        (25, 16)        (RowSize(5), None)
h.flatten(0, 1)                     [20, 16]        [25, 16]        RowDim(0)
torch.arange(n)                     [4]             [5]             RowDim(0, counted=True)
torch.arange(x.shape[1])            [16]            [16]            None
h.mean(0)                           [16]            [16]            UNKNOWN
h @ h.T                             [4, 4]          [5, 5]          UNKNOWN
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pippy.ir.base.trees import UNKNOWN, Unknown, children, leaves


@dataclass(frozen=True)
class RowSize:
    """A number for each number of rows: ``each * rows + rest``."""

    each: int
    rest: int = 0


@dataclass(frozen=True)
class RowDim:
    """The dimension of a tensor in which its rows are, or as many values for each row.

    With ``counted``, it depends on the number of rows, and not on their values: for fewer rows it has the first of its values.
    """

    dim: int
    counted: bool = False


def compare_rows(first: Any, second: Any, rows: int, more: int, counted: bool) -> Any:
    """How a value depends on the rows, which is ``first`` for ``rows`` rows and ``second`` for ``more``: see the table above.

    With ``counted``, it does not depend on the values of the rows.

    >>> compare_rows((20, 16), (25, 16), 4, 5, counted=True)
    (RowSize(each=5, rest=0), None)
    >>> compare_rows([torch.ones(2, 4), torch.ones(4)], [torch.ones(2, 5), torch.ones(4)], 4, 5, counted=False)
    (RowDim(dim=1, counted=False), UNKNOWN)
    """
    first_items, second_items = items_of(first), items_of(second)
    if first_items is not None:
        if second_items is None or len(first_items) != len(second_items):
            return UNKNOWN
        return tuple(compare_rows(*pair, rows, more, counted) for pair in zip(first_items, second_items))
    if isinstance(first, torch.Tensor):
        return _compare_shapes(first, second, rows, more, counted) if isinstance(second, torch.Tensor) else UNKNOWN
    if type(first) is int and type(second) is int and first != second:
        each, left = divmod(second - first, more - rows)
        return UNKNOWN if left else RowSize(each, first - each * rows)
    same = type(first) is type(second) and (not isinstance(first, (int, float, str)) or first == second)
    return None if same else UNKNOWN


def _compare_shapes(first: torch.Tensor, second: torch.Tensor, rows: int, more: int, counted: bool) -> Any:
    if first.dim() != second.dim():
        return UNKNOWN
    differing = [dim for dim, sizes in enumerate(zip(first.shape, second.shape)) if sizes[0] != sizes[1]]
    if not differing:
        return None if counted else UNKNOWN
    dim = differing[0]
    fits = len(differing) == 1 and first.shape[dim] % rows == 0 and first.shape[dim] * more == second.shape[dim] * rows
    return RowDim(dim, counted) if fits else UNKNOWN


def items_of(value: Any) -> Sequence[Any] | None:
    """The items of a container, or of a size; None if ``value`` is neither."""
    return tuple(value) if isinstance(value, torch.Size) else children(value)


def dims_of(dependence: Any, value: Any) -> Iterator[RowDim | Unknown | None]:
    """For each leaf of the value the dimension of its rows; None if it has none."""
    if isinstance(dependence, tuple) and children(value) is not None:
        for each, item in zip(dependence, children(value) or ()):
            yield from dims_of(each, item)
    elif dependence is UNKNOWN:
        yield from (UNKNOWN for _ in leaves(value))
    else:
        yield dependence if isinstance(dependence, RowDim) else None
