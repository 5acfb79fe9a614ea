"""The order that ZB-H1 and ZB-H2 share: 1F1B with backwards in halves, where W waits for idle time.

Another worker waits only for the input half (I) of a backward, so the weight half (W) can fill gaps. Each worker delays
its W until it holds as many micro-batches as every other worker, and runs the delayed ones while the pipeline drains.
"""

from itertools import chain

from pippy.drivers.plan.language.errors import PlacementError
from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.language.placement import Placement, Run
from pippy.drivers.plan.orders.schedule import F, I, W, WorkerOrders, passes


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
