"""ZB-V: backwards in halves on a V-shaped placement. If F, I and W take the same time, there is no gap but the fill.

Worker w of p holds stage w and, on the way back, stage 2p-1-w. The last worker goes from its first stage to its second without
a wait, so backwards begin early. Each worker holds at most 2p stage-micro-batches, as much as the first worker of 1F1B.
"""

from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.pattern import RepeatedPasses, require_v, write_out
from pippy.drivers.plan.orders.schedule import WorkerOrders, keep


def zb_v(placement: Placement, chunks: int) -> WorkerOrders:
    """For two stages on each worker, placed in a V.

    >>> result = zb_v(Placement((0, 1, 1, 0)), chunks=1)
    >>> " ".join(map(str, result.orders[1]))
    'F1.0 F2.0 I2.0 W2.0 I1.0 W1.0'
    """
    orders: list[list[Compute]] = [[] for _ in range(placement.workers)]
    for w, worker in enumerate(require_v(placement, "zb_v")):
        regular = max(chunks, 2 * placement.workers - 1)
        order = write_out(placement.stages_of(worker), phases(placement.workers, w, regular))
        orders[worker] = keep(order, chunks)
    return WorkerOrders(orders, memory=[2 * min(chunks, placement.workers)] * placement.workers)


def phases(p: int, w: int, chunks: int) -> list[RepeatedPasses]:
    """Worker w's order, for at least 2p-1 chunks."""
    return [
        (2 * (p - w) - 1, "F0"),
        (w, "F1 F0"),
        (p - w, "F1 I1 W1"),
        (chunks - (2 * p - 1 - w), "F0 I0 W0 F1 I1 W1"),
        (p - w - 1, "I0 W0 F1 I1 W1"),
        (w, "I0 I1"),
        (p - w, "I0 W0"),
        (w, "W1"),
        (w, "W0"),
    ]
