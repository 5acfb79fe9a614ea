"""DualPipeV: the V-shaped half of DualPipe. A forward and a backward of different micro-batches come in pairs.

A runtime may overlap the communication of one with the computation of the other. The order here has the forward first.
Backwards come in halves only where they fill gaps at the ends. A worker holds at most 2p+1 stage-micro-batches.
"""

from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.pattern import RepeatedPasses, require_v, write_out
from pippy.drivers.plan.orders.schedule import WorkerOrders, keep


def dualpipe_v(placement: Placement, chunks: int) -> WorkerOrders:
    """For two stages on each worker, placed in a V.

    >>> result = dualpipe_v(Placement((0, 1, 1, 0)), chunks=1)
    >>> " ".join(map(str, result.orders[1]))
    'F1.0 F2.0 B2.0 B1.0'
    """
    orders: list[list[Compute]] = [[] for _ in range(placement.workers)]
    for w, worker in enumerate(require_v(placement, "dualpipe_v")):
        regular = max(chunks, 2 * placement.workers)
        order = write_out(placement.stages_of(worker), phases(placement.workers, w, regular))
        orders[worker] = keep(order, chunks)
    return WorkerOrders(orders, memory=[min(2 * chunks, 2 * placement.workers + 1)] * placement.workers)


def phases(p: int, w: int, chunks: int) -> list[RepeatedPasses]:
    """Worker w's order, for at least 2p chunks."""
    after = p - w - 1
    return [
        (2 * after, "F0"),
        (w + 1, "F0 F1"),
        (after, "I1 W F1"),
        (chunks - 2 * p + w + 1, "F0 B1 F1 B0"),
        (after, "B1 F1 B0"),
        *drain(w + 1),
        (after, "W I0"),
        (w + 1, "W"),
    ]


def drain(pairs: int) -> list[RepeatedPasses]:
    """Pairs of backwards: whole ones first, then halves whose W is put off to the end."""
    if pairs % 2:
        return [(pairs // 2, "B1 B0"), (1, "B1 I0"), (pairs // 2, "I1 I0")]
    return [(pairs // 2, "B1 B0"), (pairs // 2, "I1 I0")]
