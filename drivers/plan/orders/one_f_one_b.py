"""1F1B: a backward runs as soon as it can, so a stage holds no more micro-batches than there are stages from it to the end.

Run i of r runs of adjacent stages (stage i of r, with one stage on each worker) begins with min(chunks, r - i) forwards. Then
it takes a backward and a forward in turn. It idles as long as fill-drain, and holds r - i micro-batches instead of all.
"""

from collections.abc import Callable
from itertools import accumulate, chain, pairwise
from operator import itemgetter

from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.schedule import B, F, WorkerOrders, keep, passes

TimeSlot = tuple[int, list[Compute]]


def one_f_one_b(placement: Placement, chunks: int) -> WorkerOrders:
    """Each run of stages follows its own 1F1B order. A worker with several runs takes the passes by their time slots.

    >>> result = one_f_one_b(Placement((0, 1)), chunks=3)
    >>> [str(compute) for compute in result.orders[0]]
    ['F0.0', 'F0.1', 'B0.0', 'F0.2', 'B0.1', 'B0.2']
    """
    return backward_and_forward_in_turn(placement, chunks, warm_up=lambda ahead: ahead)


def backward_and_forward_in_turn(placement: Placement, chunks: int, warm_up: Callable[[int], int]) -> WorkerOrders:
    """1F1B, where a run begins with ``warm_up(ahead)`` forwards. ``ahead`` counts the runs from it to the end."""
    slots: list[list[TimeSlot]] = [[] for _ in range(placement.workers)]
    memory = [0] * placement.workers
    for index, run in enumerate(placement.runs):
        ahead = len(placement.runs) - index
        most = warm_up(ahead)
        memory[run.worker] += len(run.stages) * min(chunks, most)
        for chunk in range(chunks):
            forward = index + chunk if chunk < most else backward_slot(index, ahead, chunk - most) + 1
            slots[run.worker] += [
                (forward, passes(F, run.stages, chunk)),
                (backward_slot(index, ahead, chunk), passes(B, run.stages, chunk)),
            ]
    return WorkerOrders([in_order_of_time(taken) for taken in slots], memory)


def backward_slot(index: int, ahead: int, chunk: int) -> int:
    """The time slot of a run's backward. A forward has every slot while the run warms up, and later that after a backward.

    The slots grow along every dependency, so workers that follow them cannot wait for one another in a circle.
    """
    return index + 2 * (ahead + chunk) - 1


def in_order_of_time(slots: list[TimeSlot]) -> list[Compute]:
    return [compute for _, computes in sorted(slots, key=itemgetter(0)) for compute in computes]


def eager_1f1b(placement: Placement, chunks: int) -> WorkerOrders:
    """Eager 1F1B: 1F1B that starts about twice as many forwards before the first backward, for slow links.

    Run i of r runs begins with min(chunks, 2(r - i) - 1) forwards, and holds as many micro-batches. So while values are on
    their way to the next worker and back, there is a forward to do. If values take no time, it idles as long as 1F1B.

    For any placement, as 1F1B.

    >>> result = eager_1f1b(Placement((0, 1)), chunks=4)
    >>> [str(compute) for compute in result.orders[0]]
    ['F0.0', 'F0.1', 'F0.2', 'B0.0', 'F0.3', 'B0.1', 'B0.2', 'B0.3']
    """
    return backward_and_forward_in_turn(placement, chunks, warm_up=lambda ahead: 2 * ahead - 1)


def interleaved_1f1b(placement: Placement, chunks: int) -> WorkerOrders:
    """Interleaved 1F1B: several stages on each worker, so that a worker waits for a stage's time and not for a worker's.

    With v stages on each of p workers, placed round and round, a worker idles for (p-1)(F+B)/v, for p or more chunks.
    Micro-batches go through in groups: a group passes the worker's first stage, then its second, and so on. A group of p comes
    round without a gap. If p does not divide the chunks, the groups are a little larger, never smaller. The price is memory:
    worker w warms up with (v-1)g + 2(p-1-w) forwards, where g is the size of the first group, and then holds one more.

    Any number of stages a worker, any number of chunks.

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
