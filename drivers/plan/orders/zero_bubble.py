"""The order that ZB-H1 and ZB-H2 share: 1F1B with backwards in halves, where W waits for idle time.

Another worker waits only for the input half (I) of a backward, so the weight half (W) can fill gaps. Each worker delays
its W until it holds as many micro-batches as every other worker, and runs the delayed ones while the pipeline drains.
"""

from itertools import chain

from pippy.drivers.plan.language.errors import PlacementError
from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.language.placement import Placement, Run
from pippy.drivers.plan.orders.schedule import F, I, RepeatedPasses, W, WorkerOrders, keep, passes, require_v, write_out


def one_run_each(placement: Placement, schedule: str) -> tuple[Run, ...]:
    """The placement's runs, if every worker holds one."""
    if not placement.one_run_each():
        raise PlacementError(
            f"{schedule} needs one run of adjacent stages on each worker, not placement {placement}; "
            "take 1f1b, which works on any placement, or placement='linear'"
        )
    return placement.runs


def zero_bubble(placement: Placement, chunks: int, depth: int, schedule: str) -> WorkerOrders:
    """Warm up with depth x (runs to the end) - (depth - 1) forwards. No worker holds more than the first one."""
    runs = one_run_each(placement, schedule)
    orders: list[list[Compute]] = [[] for _ in runs]
    memory = [0] * len(runs)
    for index, run in enumerate(runs):
        warm_up = depth * (len(runs) - index) - (depth - 1)
        # with few chunks there is more time than work, and a W that is put off too far ends too late
        put_off = index + min((depth - 1) * index, max(0, chunks - len(runs)))
        orders[run.worker] = run_order(run, chunks, warm_up, put_off)
        memory[run.worker] = len(run.stages) * min(chunks, warm_up + depth * index)
    return WorkerOrders(orders, memory)


def run_order(run: Run, chunks: int, warm_up: int, put_off: int) -> list[Compute]:
    """Forwards to warm up; I, W and F in turn; I and W in turn; and the remaining W."""
    order = [(F, chunk) for chunk in range(min(warm_up, chunks))]
    for chunk in range(chunks):
        order.append((I, chunk))
        if chunk >= put_off:
            order.append((W, chunk - put_off))
        if chunk + warm_up < chunks:
            order.append((F, chunk + warm_up))
    order += [(W, chunk) for chunk in range(max(0, chunks - put_off), chunks)]
    return list(chain.from_iterable(passes(op, run.stages, chunk) for op, chunk in order))


def zb_h1(placement: Placement, chunks: int) -> WorkerOrders:
    """ZB-H1: a worker idles for (p-1)(F+I-W) only, and needs no more memory than the first worker of 1F1B.

    Worker w warms up with p - w forwards and puts its W off by w micro-batches, so each worker holds p of them.

    For one run of adjacent stages on each worker.

    >>> result = zb_h1(Placement((0, 1)), chunks=3)
    >>> " ".join(map(str, result.orders[1]))
    'F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2'
    """
    return zero_bubble(placement, chunks, depth=1, schedule="zb_h1")


def zb_h2(placement: Placement, chunks: int) -> WorkerOrders:
    """ZB-H2: no gap between a worker's first and last pass if F, I and W take the same time, for twice the memory of ZB-H1.

    Worker w warms up with 2(p-w) - 1 forwards and puts its W off by 2w micro-batches, so each worker holds 2p-1 of them.

    For one run of adjacent stages on each worker.

    >>> result = zb_h2(Placement((0, 1)), chunks=3)
    >>> " ".join(map(str, result.orders[0]))
    'F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2'
    """
    return zero_bubble(placement, chunks, depth=2, schedule="zb_h2")


def zb_v(placement: Placement, chunks: int) -> WorkerOrders:
    """ZB-V: backwards in halves on a V-shaped placement. If F, I and W take the same time, there is no gap but the fill.

    Worker w of p holds stage w and, on the way back, stage 2p-1-w. The last worker goes from its first stage to its second
    without a wait, so backwards begin early. Each worker holds at most 2p stage-micro-batches, as much as the first worker of
    1F1B.

    For two stages on each worker, placed in a V.

    >>> result = zb_v(Placement((0, 1, 1, 0)), chunks=1)
    >>> " ".join(map(str, result.orders[1]))
    'F1.0 F2.0 I2.0 W2.0 I1.0 W1.0'
    """
    orders: list[list[Compute]] = [[] for _ in range(placement.workers)]
    for w, worker in enumerate(require_v(placement, "zb_v")):
        regular = max(chunks, 2 * placement.workers - 1)
        order = write_out(placement.stages_of(worker), phases(placement.workers, w, regular))
        orders[worker] = keep(order, chunks)
    return WorkerOrders(orders, memory=[2 * min(chunks, placement.workers)] * placement.workers)


def phases(p: int, w: int, chunks: int) -> list[RepeatedPasses]:
    """Worker w's order, for at least 2p-1 chunks."""
    return [
        (2 * (p - w) - 1, "F0"),
        (w, "F1 F0"),
        (p - w, "F1 I1 W1"),
        (chunks - (2 * p - 1 - w), "F0 I0 W0 F1 I1 W1"),
        (p - w - 1, "I0 W0 F1 I1 W1"),
        (w, "I0 I1"),
        (p - w, "I0 W0"),
        (w, "W1"),
        (w, "W0"),
    ]
