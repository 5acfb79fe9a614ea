"""Fill-drain (GPipe): all forwards, then all backwards.

With one stage on each of p workers, a worker idles for (p-1)(F+B), whatever the number of chunks, and holds all chunks at its
peak. On a looped placement this is looped breadth-first; see looped_bfs.py.
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
