"""ZB-H2: no gap between a worker's first and last pass if F, I and W take the same time, for twice the memory of ZB-H1.

Worker w warms up with 2(p-w) - 1 forwards and puts its W off by 2w micro-batches, so each worker holds 2p-1 of them.
"""

from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.schedule import WorkerOrders
from pippy.drivers.plan.orders.zero_bubble import zero_bubble


def zb_h2(placement: Placement, chunks: int) -> WorkerOrders:
    """For one run of adjacent stages on each worker.

    >>> result = zb_h2(Placement((0, 1)), chunks=3)
    >>> " ".join(map(str, result.orders[0]))
    'F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2'
    """
    return zero_bubble(placement, chunks, depth=2, schedule="zb_h2")
