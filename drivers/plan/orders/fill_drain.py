"""Fill-drain (GPipe): all forwards, then all backwards.

With one stage on each of p workers, a worker idles for (p-1)(F+B), whatever the number of chunks, and holds all chunks at its
peak. On a looped placement this is looped breadth-first.
"""

from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.language.placement import Placement, Run
from pippy.drivers.plan.orders.schedule import B, F, WorkerOrders, passes


def fill_drain(placement: Placement, chunks: int) -> WorkerOrders:
    """All micro-batches go up through a run of stages, then through the worker's next run; then all go back down.

    >>> result = fill_drain(Placement((0, 1)), chunks=2)
    >>> [str(compute) for compute in result.orders[0]]
    ['F0.0', 'F0.1', 'B0.0', 'B0.1']
    """
    orders: list[list[Compute]] = [[] for _ in range(placement.workers)]
    for run in placement.runs:
        orders[run.worker] += forwards(run, chunks)
    for run in reversed(placement.runs):
        orders[run.worker] += [compute for chunk in range(chunks) for compute in passes(B, run.stages, chunk)]
    return WorkerOrders(
        orders, memory=[chunks * len(placement.stages_of(worker)) for worker in range(placement.workers)]
    )


def forwards(run: Run, chunks: int) -> list[Compute]:
    return [compute for chunk in range(chunks) for compute in passes(F, run.stages, chunk)]


def looped_bfs(placement: Placement, chunks: int) -> WorkerOrders:
    """Looped breadth-first: each worker takes every micro-batch through one of its stages before it turns to its next.

    With v stages on each of p workers, a worker idles for (p-1)(F+B)/v as in interleaved 1F1B, and its peak is that of
    fill-drain. A stage's weights are needed without interruption, and its gradients are complete early.

    Fill-drain, meant for a looped placement.

    >>> result = looped_bfs(Placement((0, 1, 0, 1)), chunks=2)
    >>> [str(compute) for compute in result.orders[0]]
    ['F0.0', 'F0.1', 'F2.0', 'F2.1', 'B2.0', 'B2.1', 'B0.0', 'B0.1']
    """
    return fill_drain(placement, chunks)


def forward_only(placement: Placement, chunks: int) -> WorkerOrders:
    """Forward only, for inference. Nothing is kept for a backward, so a worker holds one stage-micro-batch at a time.

    The forwards of fill-drain.

    >>> result = forward_only(Placement((0, 1)), chunks=2)
    >>> [str(compute) for compute in result.orders[1]]
    ['F1.0', 'F1.1']
    """
    orders: list[list[Compute]] = [[] for _ in range(placement.workers)]
    for run in placement.runs:
        orders[run.worker] += forwards(run, chunks)
    return WorkerOrders(orders, memory=[1] * placement.workers)
