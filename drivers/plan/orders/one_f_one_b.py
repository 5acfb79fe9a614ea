"""1F1B: a backward runs as soon as it can, so a stage holds no more micro-batches than there are stages from it to the end.

Run i of r runs of adjacent stages (stage i of r, with one stage on each worker) begins with min(chunks, r - i) forwards. Then
it takes a backward and a forward in turn. It idles as long as fill-drain, and holds r - i micro-batches instead of all.
"""

from collections.abc import Callable
from operator import itemgetter

from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.schedule import B, F, WorkerOrders, passes

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
