"""What the check of a first step may take, and what it has compared."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.base.free_memory import free_bytes
from pippy.drivers.driver.check.report import counted
from pippy.ir.base.brief import brief
from pippy.ir.base.readable import count_with_noun

SECONDS = 2.0
_PART = 0.5  # of the free memory


@dataclass(frozen=True)
class Cost:
    """What so many rows have cost in the plain model: seconds, and the most bytes beside its parameters."""

    rows: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Budget:
    """How long the plain model may run for a comparison, and by how much of the free memory. The fewest rows may take longer.

    >>> Budget.of(True), Budget.of("full"), Budget.of(10), Budget.of(False)
    (Budget(seconds=2.0), Budget(seconds=inf), Budget(seconds=10.0), None)
    """

    seconds: float = SECONDS

    @classmethod
    def of(cls, check: object) -> "Budget | None":
        """The budget that the argument ``check`` of a driver gives; None if nothing is to be checked."""
        if isinstance(check, bool):
            return cls() if check else None
        if check == "full":
            return cls(math.inf)
        if isinstance(check, (int, float)) and check > 0:
            return cls(float(check))
        raise DriverError(
            f"check={brief(check)}: give True, a number of seconds for which the plain model may run, 'full' for all rows "
            "however long they take, or False for no check"
        )

    def rows(self, cost: Cost, device: torch.device) -> float:
        """How many rows fit, if they cost as these do.

        >>> Budget(2.0).rows(Cost(rows=5, seconds=0.5, bytes=1), torch.device("cpu"))
        20.0
        """
        return cost.rows * min(self.seconds / max(cost.seconds, 1e-9), room(device) / max(cost.bytes, 1))

    def is_over_memory(self, cost: Cost | None, rows: int, device: torch.device) -> bool:
        """Whether so many rows would take too much memory."""
        return cost is not None and cost.bytes * rows > room(device) * cost.rows


def room(device: torch.device) -> float:
    """The bytes that the plain model may take on a device."""
    return free_bytes(device) * _PART


@dataclass(frozen=True)
class Checked:
    """What the check of a step has compared. Print it.

    ``by_model`` says whether the plain model was the witness; else it was the pipeline as one micro-batch. Of the ``rows`` of
    the mini-batch so many were ``tried``, in ``chunks`` micro-batches; if they were ``padded``, also with other numbers in them.
    ``compared`` counts the tensors of each kind, and ``largest`` is the largest difference, relative to its tensor. A check whose
    numbers are not finite is made again.

    >>> print(Checked(True, 64, 64, 4, {"loss": 1, "gradient": 6}, 2e-7, seconds=0.1))
    the first step is the plain model's: 64 of 64 rows in 4 micro-batches: the loss and 6 gradients; largest difference 2.0e-07; 0.10 s
    """  # noqa: E501

    by_model: bool
    rows: int | None
    tried: int | None
    chunks: int
    compared: Mapping[str, int] = field(default_factory=dict)
    largest: float = 0.0
    is_finite: bool = True
    padded: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        who = "the plain model's" if self.by_model else "what the pipeline gives without micro-batches"
        rows = "" if self.rows is None else f"{self.tried} of {self.rows} rows in "
        padded = ", also with other targets" * self.padded
        finite = "" if self.is_finite else "; some numbers are not finite, so the next step is compared, too"
        return (
            f"the first step is {who}: {rows}{count_with_noun(self.chunks, 'micro-batch')}{padded}: {counted(self.compared)}; "
            f"largest difference {self.largest:.1e}{finite}; {self.seconds:.2f} s"
        )
