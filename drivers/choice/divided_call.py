"""One call of a driver that is to fit: how it is cut into micro-batches, and the numbers of micro-batches to try."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.division import Division
from pippy.drivers.plan.choice.candidate import MicroBatch
from pippy.ir.base.errors import GuardError, PippyError
from pippy.ir.base.trees import tensors

CallShapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DividedCall:
    """The arguments of one call of a driver. ``divided`` cuts them into micro-batches; ``estimate`` says what one takes.

    ``optimizers`` is the number of the driver's optimizers, whose states are counted too.
    """

    arguments: tuple[Any, ...]
    optimizers: int
    divided: Callable[[int], Division]
    estimate: Callable[[int], MicroBatch]

    @cached_property
    def rows(self) -> int | None:
        """The number of rows of the mini-batch; None if nothing in it has rows."""
        sizes = self.divided(1).sizes
        return None if sizes is None else sum(sizes)

    @property
    def rows_to_cut(self) -> int:
        """The number of rows, of a call that gives no number of micro-batches. Raises if it has none."""
        if self.rows is None:
            raise DriverError(
                "chunks=None: no argument has rows to cut; give the number of micro-batches, as in driver.run(1, x, target)"
            )
        return self.rows

    def counts_above(self, chunks: int) -> list[int]:
        """The numbers of micro-batches to try that are higher than this one."""
        return [count for count in counts_of_chunks(self.rows or 1) if count > chunks and self.runs(count)]

    @property
    def counts(self) -> list[int]:
        """The numbers of micro-batches to try. If the Pipe's graph runs none of them, all, so that an estimate says why."""
        counts = counts_of_chunks(self.rows_to_cut)
        return [count for count in counts if self.runs(count)] or counts

    def runs(self, chunks: int) -> bool:
        """Whether the Pipe's graph runs so many micro-batches: for the sizes of others, forward may go on in another way."""
        try:
            self.estimate(chunks)
        except PippyError as error:
            return not fails_guard(error)
        return True

    @cached_property
    def shapes(self) -> CallShapes:
        """All that the bytes depend on: the number of optimizers, whether autocast is in force, the shapes of the tensors."""
        casts = (1,) * torch._C._is_any_autocast_enabled()
        return ((self.optimizers,), casts, *(tuple(tensor.shape) for tensor in tensors(self.arguments)))


def fails_guard(error: BaseException | None) -> bool:
    """Whether an error comes from a guard that failed.

    >>> fails_guard(GuardError("x is None")), fails_guard(DriverError("why"))
    (True, False)
    """
    while error is not None and not isinstance(error, GuardError):
        error = error.__cause__
    return error is not None


def no_larger(shapes: CallShapes, counted: CallShapes) -> bool:
    """Whether no tensor of ``shapes`` is larger than the one of ``counted`` in its place.

    >>> no_larger(((8, 3), ()), ((8, 4), ())), no_larger(((9, 3),), ((8, 4),)), no_larger(((8,),), ((8, 4),))
    (True, False, False)
    """
    return len(shapes) == len(counted) and all(
        len(one) == len(other) and all(map(int.__le__, one, other)) for one, other in zip(shapes, counted)
    )


def counts_of_chunks(rows: int) -> list[int]:
    """The numbers of micro-batches to try for so many rows. Most divide the rows, and each is clearly more than the last.

    >>> counts_of_chunks(8), counts_of_chunks(60), counts_of_chunks(17)
    ([1, 2, 4, 8], [1, 2, 3, 5, 10, 15, 30, 60], [1, 2, 4, 8, 16, 17])
    """
    counts = [1]
    for count in range(2, rows + 1):
        if count >= counts[-1] * (1.4 if rows % count == 0 else 2) and -(-rows // count) < -(-rows // counts[-1]):
            counts.append(count)
    return counts if counts[-1] == rows else [*counts, rows]
