"""V-Half: the V of ZB-V in about half of 1F1B's memory: p/2 + 1 micro-batches of a worker, rounded up.

The building block takes steps of 1 towards the last worker and of 2 back. The turns were found by trying. If F, I and W take
the same time and m >= p > 3, a worker idles for (3p-7)/2 forwards of a worker, and for half a forward less if p is odd.
"""

from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.building_block import building_block, squeeze
from pippy.drivers.plan.orders.pattern import require_v
from pippy.drivers.plan.orders.schedule import WorkerOrders


def v_half(placement: Placement, chunks: int) -> WorkerOrders:
    """For two stages on each worker, placed in a V.

    >>> result = v_half(Placement((0, 1, 1, 0)), chunks=1)
    >>> " ".join(map(str, result.orders[1]))
    'F1.0 F2.0 I2.0 I1.0 W2.0 W1.0'
    """
    require_v(placement, "v_half")
    p = placement.workers
    block = building_block(p, down=1, up=2, turns=(1, 6, 3) if p % 2 else (1, 4, 2))
    memory = 2 * min(chunks, p, (p + 1) // 2 + 1)
    return WorkerOrders(squeeze(placement, block, chunks, memory), memory=[memory] * p)
