"""Looped breadth-first: each worker takes every micro-batch through one of its stages before it turns to its next.

With v stages on each of p workers, a worker idles for (p-1)(F+B)/v as in interleaved 1F1B, and its peak is that of fill-drain.
A stage's weights are needed without interruption, and its gradients are complete early.
"""

from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.fill_drain import fill_drain
from pippy.drivers.plan.orders.schedule import WorkerOrders


def looped_bfs(placement: Placement, chunks: int) -> WorkerOrders:
    """Fill-drain, meant for a looped placement.

    >>> result = looped_bfs(Placement((0, 1, 0, 1)), chunks=2)
    >>> [str(compute) for compute in result.orders[0]]
    ['F0.0', 'F0.1', 'F2.0', 'F2.1', 'B2.0', 'B2.1', 'B0.0', 'B0.1']
    """
    return fill_drain(placement, chunks)
