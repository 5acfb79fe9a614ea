"""V-Min: the V of ZB-V in about a third of 1F1B's memory: (p+4)/3 micro-batches of a worker, rounded down.

The building block takes the shortest steps, so a micro-batch is soon done. If F, I and W take the same time and m >= p > 2, a
worker idles for (4p-5-2x)/2 forwards of a worker, where x is the distance from p up to the next number that is 1 modulo 3.
"""

from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.building_block import building_block, squeeze
from pippy.drivers.plan.orders.pattern import require_v
from pippy.drivers.plan.orders.schedule import WorkerOrders


def v_min(placement: Placement, chunks: int) -> WorkerOrders:
    """For two stages on each worker, placed in a V.

    >>> result = v_min(Placement((0, 1, 1, 0)), chunks=1)
    >>> " ".join(map(str, result.orders[1]))
    'F1.0 F2.0 I2.0 I1.0 W2.0 W1.0'
    """
    require_v(placement, "v_min")
    p = placement.workers
    x = (1 - p) % 3
    block = building_block(p, down=1, up=1, turns=(1, 1 + 2 * x, 1))  # so no two passes of a worker meet
    memory = min(2 * chunks, 2 * ((p + 4) // 3))
    return WorkerOrders(squeeze(placement, block, chunks, memory), memory=[memory] * p)
