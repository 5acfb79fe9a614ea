"""Forward only, for inference. Nothing is kept for a backward, so a worker holds one stage-micro-batch at a time."""

from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.fill_drain import forwards
from pippy.drivers.plan.orders.schedule import WorkerOrders


def forward_only(placement: Placement, chunks: int) -> WorkerOrders:
    """The forwards of fill-drain.

    >>> result = forward_only(Placement((0, 1)), chunks=2)
    >>> [str(compute) for compute in result.orders[1]]
    ['F1.0', 'F1.1']
    """
    orders: list[list[Compute]] = [[] for _ in range(placement.workers)]
    for run in placement.runs:
        orders[run.worker] += forwards(run, chunks)
    return WorkerOrders(orders, memory=[1] * placement.workers)
