"""How values that go from stage to stage depend on the number of rows of a batch: sizes, and the shapes of tensors.

forward                             for 4 rows      for 5 rows      found
──────────────────────────────────────────────────────────────────────────────────────
n = x.shape[0]                      4               5               RowSize(1)
shape = h.flatten(0, 1).shape       (20, 16)        (25, 16)        (RowSize(5), None)
h.flatten(0, 1)                     [20, 16]        [25, 16]        RowDim(0)
torch.arange(n)                     [4]             [5]             RowDim(0, counted=True)
torch.arange(x.shape[1])            [16]            [16]            None
h.mean(0)                           [16]            [16]            UNSURE
h @ h.T                             [4, 4]          [5, 5]          UNSURE
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch

from pippy.ir.trees import children, leaves, with_children


class _Unsure(Enum):
    UNSURE = "unsure"

    def __repr__(self) -> str:
        return self.name


UNSURE: Final = _Unsure.UNSURE


@dataclass(frozen=True)
class RowSize:
    """A number for each number of rows: ``each * rows + rest``.

    >>> RowSize(5, 1).at(4)
    21
    """

    each: int
    rest: int = 0

    def at(self, rows: int) -> int:
        return self.each * rows + self.rest


@dataclass(frozen=True)
class RowDim:
    """The dimension of a tensor that has its rows, or as many values for each row.

    ``counted``: it depends on the number of rows, and not on what they hold. For fewer rows it has the first of its values.
    """

    dim: int
    counted: bool = False


def compare_rows(first: Any, second: Any, rows: int, more: int, counted: bool) -> Any:
    """What a value that is ``first`` for ``rows`` rows and ``second`` for ``more`` has of them: as above, for each part of it.

    ``counted``: it does not depend on what the rows hold.

    >>> compare_rows((20, 16), (25, 16), 4, 5, counted=True)
    (RowSize(each=5, rest=0), None)
    >>> compare_rows([torch.ones(2, 4), torch.ones(4)], [torch.ones(2, 5), torch.ones(4)], 4, 5, counted=False)
    (RowDim(dim=1, counted=False), UNSURE)
    """
    ours, theirs = parts(first), parts(second)
    if ours is not None:
        if theirs is None or len(ours) != len(theirs):
            return UNSURE
        return tuple(compare_rows(*pair, rows, more, counted) for pair in zip(ours, theirs))
    if isinstance(first, torch.Tensor):
        return _compare_shapes(first, second, rows, more, counted) if isinstance(second, torch.Tensor) else UNSURE
    if type(first) is int and type(second) is int and first != second:
        each, left = divmod(second - first, more - rows)
        return UNSURE if left else RowSize(each, first - each * rows)
    same = type(first) is type(second) and (not isinstance(first, (int, float, str)) or first == second)
    return None if same else UNSURE


def _compare_shapes(first: torch.Tensor, second: torch.Tensor, rows: int, more: int, counted: bool) -> Any:
    if first.dim() != second.dim():
        return UNSURE
    differing = [dim for dim, sizes in enumerate(zip(first.shape, second.shape)) if sizes[0] != sizes[1]]
    if not differing:
        return None if counted else UNSURE
    dim = differing[0]
    fits = len(differing) == 1 and first.shape[dim] % rows == 0 and first.shape[dim] * more == second.shape[dim] * rows
    return RowDim(dim, counted) if fits else UNSURE


def parts(value: Any) -> Sequence[Any] | None:
    """The items of a container, or of a size; None if ``value`` is neither."""
    return tuple(value) if isinstance(value, torch.Size) else children(value)


def is_known(found: Any) -> bool:
    """Whether all is known of a value.

    >>> is_known((None, RowDim(0))), is_known((None, UNSURE))
    (True, False)
    """
    return all(each is not UNSURE for each in leaves(found))


def at_rows(found: Any, rows: int, value: Any) -> Any:
    """The value with its sizes for another number of rows.

    >>> at_rows((RowSize(5), None), 2, torch.Size([20, 16]))
    torch.Size([10, 16])
    """
    if isinstance(found, RowSize):
        return found.at(rows)
    if not isinstance(found, tuple):
        return value
    items = [at_rows(each, rows, part) for each, part in zip(found, parts(value) or ())]
    return torch.Size(items) if isinstance(value, torch.Size) else with_children(value, items)


def dims_of(found: Any, value: Any) -> Iterator[RowDim | _Unsure | None]:
    """For each leaf of the value where its rows are, None if it has none."""
    if isinstance(found, tuple) and children(value) is not None:
        for each, item in zip(found, children(value) or ()):
            yield from dims_of(each, item)
    elif found is UNSURE:
        yield from (UNSURE for _ in leaves(value))
    else:
        yield found if isinstance(found, RowDim) else None


def guess_rows(value: Any, rows: int) -> Any:
    """What a value may have of its rows, where nothing is known: a size that is their number, a dimension of a multiple.

    >>> guess_rows([torch.Size([20, 16]), 4, torch.ones(8, 2)], 4)
    ((RowSize(each=5, rest=0), None), RowSize(each=1, rest=0), RowDim(dim=0, counted=False))
    """
    if isinstance(value, torch.Size) and value and value[0] and value[0] % rows == 0:
        return (RowSize(value[0] // rows), *(guess_rows(size, rows) for size in value[1:]))
    held = parts(value)
    if held is not None:
        return tuple(guess_rows(item, rows) for item in held)
    if isinstance(value, torch.Tensor):
        dims = [dim for dim, size in enumerate(value.shape) if size == rows]
        dims += [0] if value.dim() and value.shape[0] and value.shape[0] % rows == 0 else []
        return RowDim(dims[0]) if dims else None
    return RowSize(1) if type(value) is int and value == rows else None
