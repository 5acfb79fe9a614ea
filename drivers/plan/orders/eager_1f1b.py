"""Eager 1F1B: 1F1B that starts about twice as many forwards before the first backward, for slow links.

Run i of r runs begins with min(chunks, 2(r - i) - 1) forwards, and holds as many micro-batches. So while values are on their
way to the next worker and back, there is a forward to do. If values take no time, it idles as long as 1F1B.
"""

from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.one_f_one_b import backward_and_forward_in_turn
from pippy.drivers.plan.orders.schedule import WorkerOrders


def eager_1f1b(placement: Placement, chunks: int) -> WorkerOrders:
    """For any placement, as 1F1B.

    >>> result = eager_1f1b(Placement((0, 1)), chunks=4)
    >>> [str(compute) for compute in result.orders[0]]
    ['F0.0', 'F0.1', 'F0.2', 'B0.0', 'F0.3', 'B0.1', 'B0.2', 'B0.3']
    """
    return backward_and_forward_in_turn(placement, chunks, warm_up=lambda ahead: 2 * ahead - 1)
