"""What a schedule is: a function from a placement and a number of chunks to the orders of all workers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pippy.drivers.schedules.programs.instructions import Compute, Op

F, R, B, I, W = Op  # noqa: E741 - as the papers call them


@dataclass(frozen=True)
class WorkerOrders:
    """Each worker's order of computations, and how many stage-micro-batches each promises to hold at most.

    >>> WorkerOrders([[Compute(F, 0, 0), Compute(B, 0, 0)]], memory=[1]).memory
    [1]
    """

    orders: Sequence[Sequence[Compute]]
    memory: Sequence[int] | None = None


# A function of (placement, chunks) and perhaps options of its own.
Schedule = Callable[..., WorkerOrders]


def passes(op: Op, stages: Sequence[int], microbatch: int) -> list[Compute]:
    """One pass of adjacent stages over a micro-batch: a forward goes up the stages, a backward down.

    >>> [str(compute) for compute in passes(B, (2, 3), 0)]
    ['B3.0', 'B2.0']
    """
    return [Compute(op, stage, microbatch) for stage in (stages if op == F else reversed(stages))]


def keep(order: Iterable[Compute], chunks: int) -> list[Compute]:
    """Leave out micro-batches from ``chunks`` on.

    The rest of a schedule that works still works, because no computation needs one of another micro-batch. So a pattern
    that is regular only for some numbers of chunks can be used for all smaller ones.
    """
    return [compute for compute in order if compute.microbatch < chunks]
