"""What a schedule is: a function from a placement and a number of chunks to the orders of all workers.

Orders may be written as papers write them: a few passes, repeated some times, then others.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from pippy.drivers.plan.language.errors import PlacementError
from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.placement import Placement

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


RepeatedPasses = tuple[int, str]


def write_out(stages: Sequence[int], phases: Iterable[RepeatedPasses]) -> list[Compute]:
    """Write out repeated passes. "F1" is the next forward of the worker's second stage, "W" the oldest W that is put off.

    >>> order = write_out((0, 3), [(2, "F0"), (1, "F1 I1 I0"), (2, "W")])
    >>> " ".join(map(str, order))
    'F0.0 F0.1 F3.0 I3.0 I0.0 W3.0 W0.0'
    """
    order: list[Compute] = []
    begun: Counter[tuple[Op, int]] = Counter()
    put_off: deque[Compute] = deque()
    for repeats, passes in phases:
        for name in passes.split() * repeats:
            if name == W:
                order.append(put_off.popleft())
                continue
            op, stage = Op(name[0]), stages[int(name[1])]
            counted = I if op == B else op  # a whole backward and its half I count as the same
            order.append(Compute(op, stage, begun[counted, stage]))
            begun[counted, stage] += 1
            if op == I:
                put_off.append(Compute(W, stage, order[-1].microbatch))
    return order


def require_v(placement: Placement, schedule: str) -> list[int]:
    """The workers in the order in which a V-shaped placement first visits them. Any other placement is refused."""
    way_down = placement.worker_of[: placement.workers]
    if placement.worker_of != (*way_down, *reversed(way_down)) or len(set(way_down)) != placement.workers:
        raise PlacementError(
            f"{schedule} needs a V-shaped placement with two stages on each worker, such as 0 1 1 0, not {placement}; "
            "pass stages_per_worker=2 and leave the placement out, or take interleaved_1f1b, which works on any"
        )
    return list(way_down)
