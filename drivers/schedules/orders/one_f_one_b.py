"""1F1B: a backward as soon as there is one, so that no stage holds more micro-batches than lie between it and the end.

Run i of r runs of adjacent stages (i of r stages, with one stage a worker) begins with min(chunks, r - i) forwards
and then takes a backward and a forward in turn. It idles as much as fill-drain and holds r - i micro-batches instead
of all.
"""

from operator import itemgetter

from pippy.drivers.schedules.orders.schedule import B, F, WorkerOrders, passes
from pippy.drivers.schedules.programs.instructions import Compute
from pippy.drivers.schedules.programs.placement import Placement

TimeSlot = tuple[int, list[Compute]]


def one_f_one_b(placement: Placement, chunks: int) -> WorkerOrders:
    """Every run of stages follows its own 1F1B order; a worker with several runs takes them as their time slots come.

    >>> plan = one_f_one_b(Placement((0, 1)), chunks=3)
    >>> [str(compute) for compute in plan.orders[0]]
    ['F0.0', 'F0.1', 'B0.0', 'F0.2', 'B0.1', 'B0.2']
    """
    slots: list[list[TimeSlot]] = [[] for _ in range(placement.workers)]
    memory = [0] * placement.workers
    for index, run in enumerate(placement.runs):
        ahead = len(placement.runs) - index
        memory[run.worker] += len(run.stages) * min(chunks, ahead)
        for chunk in range(chunks):
            slots[run.worker] += [
                (forward_slot(index, ahead, chunk), passes(F, run.stages, chunk)),
                (index + 2 * (ahead + chunk) - 1, passes(B, run.stages, chunk)),
            ]
    return WorkerOrders([in_turn(taken) for taken in slots], memory)


def forward_slot(index: int, ahead: int, chunk: int) -> int:
    """When a run is due its forward, in slots of one pass: at once while it warms up, later every second slot.

    The slots grow along every dependency, so no order of the workers that follows them can deadlock.
    """
    return index + (chunk if chunk < ahead else 2 * chunk)


def in_turn(slots: list[TimeSlot]) -> list[Compute]:
    return [compute for _, computes in sorted(slots, key=itemgetter(0)) for compute in computes]
