"""Interleaved 1F1B: several stages on each worker, so that a worker waits for a stage's time and not for a worker's.

With v stages on each of p workers, placed round and round, a worker idles for (p-1)(F+B)/v, for p or more chunks.
Micro-batches go through in groups: a group passes the worker's first stage, then its second, and so on. A group of p comes
round without a gap. If p does not divide the chunks, the groups are a little larger, never smaller. The price is memory:
worker w warms up with (v-1)g + 2(p-1-w) forwards, where g is the size of the first group, and then holds one more.
"""

from itertools import accumulate, chain, pairwise

from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.schedule import B, F, WorkerOrders, keep


def interleaved_1f1b(placement: Placement, chunks: int) -> WorkerOrders:
    """Any number of stages a worker, any number of chunks.

    >>> result = interleaved_1f1b(Placement((0, 1, 0, 1)), chunks=2)
    >>> [str(compute) for compute in result.orders[1]]
    ['F1.0', 'F1.1', 'F3.0', 'B3.0', 'F3.1', 'B3.1', 'B1.0', 'B1.1']
    """
    loops = loops_of(placement)
    groups = group_sizes(max(chunks, placement.workers), placement.workers)
    orders: list[list[Compute]] = []
    memory: list[int] = []
    for worker, stages in enumerate(loops):
        warm_up = (len(stages) - 1) * groups[0] + 2 * (placement.workers - 1 - worker)
        orders.append(keep(worker_order(stages, groups, warm_up), chunks))
        memory.append(min(warm_up + 1, chunks * len(placement.stages_of(worker))))
    return WorkerOrders(orders, memory)


def group_sizes(chunks: int, workers: int) -> list[int]:
    """As many groups as possible with a micro-batch for each worker, of nearly equal size, the larger ones first.

    >>> group_sizes(11, 4)
    [6, 5]
    """
    groups = chunks // workers
    return [chunks // groups + (group < chunks % groups) for group in range(groups)]


def loops_of(placement: Placement) -> list[list[int | None]]:
    """Each worker's stage in every loop through the workers; None where a loop skips the worker.

    A placement that does not go round and round takes more loops, with gaps. The order is made as if there were stages in
    the gaps, which are then left out. What remains works, because whatever depends through a gap stays in order.
    """
    loops: list[list[int | None]] = [[] for _ in range(placement.workers)]
    last = placement.workers
    for stage, worker in enumerate(placement.worker_of):
        if worker <= last:
            for stages in loops:
                stages.append(None)
        loops[worker][-1] = stage
        last = worker
    return loops


def worker_order(loops: list[int | None], groups: list[int], warm_up: int) -> list[Compute]:
    """The warm-up, then forwards and backwards in turn, then the remaining backwards."""
    firsts = list(accumulate(groups, initial=0))
    up = [(F, stage, chunk) for first, end in pairwise(firsts) for stage in loops for chunk in range(first, end)]
    down = [
        (B, stage, chunk) for first, end in pairwise(firsts) for stage in loops[::-1] for chunk in range(first, end)
    ]
    ahead = min(warm_up, len(up))
    steady = chain.from_iterable(zip(up[ahead:], down))
    passes = [*up[:ahead], *steady, *down[len(up) - ahead :]]
    return [Compute(op, stage, chunk) for op, stage, chunk in passes if stage is not None]
