"""What a schedule is: a function from a placement and a number of chunks to the orders of all workers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from pippy.drivers.plan.language.instructions import Compute, Op

F, R, B, I, W, C = Op  # noqa: E741 - as the papers call them


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


def side_by_side(parts: Sequence[WorkerOrders], shares: Sequence[range]) -> WorkerOrders:
    """The orders of replicas of a pipeline, from that of each for as many micro-batches as its share has.

    >>> alone = WorkerOrders([[Compute(F, 0, 0)]])
    >>> [[str(compute) for compute in order] for order in side_by_side([alone, alone], [range(1), range(1, 2)]).orders]
    [['F0.0'], ['F0.1']]
    """
    orders = [
        [replace(compute, microbatch=share[compute.microbatch]) for compute in order]
        for part, share in zip(parts, shares)
        for order in part.orders
    ]
    limits = [part.memory for part in parts if part.memory is not None]
    return WorkerOrders(orders, list(chain(*limits)) if len(limits) == len(parts) else None)


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
