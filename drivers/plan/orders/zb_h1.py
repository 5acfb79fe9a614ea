"""ZB-H1: a worker idles for (p-1)(F+I-W) only, and needs no more memory than the first worker of 1F1B.

Worker w warms up with p - w forwards and puts its W off by w micro-batches, so each worker holds p of them.
"""

from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.schedule import WorkerOrders
from pippy.drivers.plan.orders.zero_bubble import zero_bubble


def zb_h1(placement: Placement, chunks: int) -> WorkerOrders:
    """For one run of adjacent stages on each worker.

    >>> result = zb_h1(Placement((0, 1)), chunks=3)
    >>> " ".join(map(str, result.orders[1]))
    'F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2'
    """
    return zero_bubble(placement, chunks, depth=1, schedule="zb_h1")
