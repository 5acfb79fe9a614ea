"""Numbers that tell how many rows a batch has, and go from stage to stage: a size of an input, say.

forward                             for 4 rows      for r rows
──────────────────────────────────────────────────────────────
n = x.shape[0]                      4               r
shape = h.flatten(0, 1).shape       (20, 16)        (5 r, 16)
"""

from dataclasses import dataclass
from typing import Any


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


def row_size(first: Any, second: Any, rows: int, more: int) -> Any:
    """A value with a `RowSize` for each number in it that differs between ``rows`` rows and ``more``; None if none does.

    >>> row_size((20, 16), (25, 16), 4, 5)
    (RowSize(each=5, rest=0), 16)
    >>> row_size(16, 16, 4, 5) is None
    True
    """
    found = _compared(first, second, rows, more)
    return found if _holds_row_size(found) else None


def _compared(first: Any, second: Any, rows: int, more: int) -> Any:
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return tuple(_compared(*pair, rows, more) for pair in zip(first, second))
    if type(first) is int and type(second) is int and first != second:
        each, left = divmod(second - first, more - rows)
        return first if left else RowSize(each, first - each * rows)
    return first


def _holds_row_size(value: Any) -> bool:
    return isinstance(value, RowSize) or (isinstance(value, tuple) and any(map(_holds_row_size, value)))


def at_rows(template: Any, rows: int, like: Any) -> Any:
    """The value of what `row_size` gave, for a number of rows, in the class of ``like``."""
    if isinstance(template, RowSize):
        return template.at(rows)
    if isinstance(template, tuple):
        items = [at_rows(each, rows, other) for each, other in zip(template, like)]
        return type(like)(items)
    return like
