"""The schedules by name."""

from collections.abc import Callable
from dataclasses import dataclass

from pippy.drivers.plan.language.errors import ArgumentError, beginning, require
from pippy.drivers.plan.orders.fill_drain import fill_drain, forward_only, looped_bfs
from pippy.drivers.plan.orders.one_f_one_b import eager_1f1b, interleaved_1f1b, one_f_one_b
from pippy.drivers.plan.orders.schedule import Schedule
from pippy.drivers.plan.orders.v_shaped import dualpipe_v, v_half, v_min
from pippy.drivers.plan.orders.zero_bubble import zb_h1, zb_h2, zb_v


@dataclass(frozen=True)
class RegisteredSchedule:
    """A schedule, its usual placement and number of stages on each worker, and whether it trains."""

    schedule: Schedule
    placement: str = "linear"
    stages_per_worker: int = 1
    training: bool = True


REGISTRY = {
    "fill_drain": RegisteredSchedule(fill_drain),
    "1f1b": RegisteredSchedule(one_f_one_b),
    "eager_1f1b": RegisteredSchedule(eager_1f1b),
    "interleaved_1f1b": RegisteredSchedule(interleaved_1f1b, "looped"),
    "looped_bfs": RegisteredSchedule(looped_bfs, "looped"),
    "zb_h1": RegisteredSchedule(zb_h1),
    "zb_h2": RegisteredSchedule(zb_h2),
    "zb_v": RegisteredSchedule(zb_v, "v", stages_per_worker=2),
    "v_half": RegisteredSchedule(v_half, "v", stages_per_worker=2),
    "v_min": RegisteredSchedule(v_min, "v", stages_per_worker=2),
    "dualpipe_v": RegisteredSchedule(dualpipe_v, "v", stages_per_worker=2),
    "forward_only": RegisteredSchedule(forward_only, training=False),
}


def register(
    name: str, schedule: Schedule, placement: str = "linear", stages_per_worker: int = 1, training: bool = True
) -> None:
    """Give a schedule of your own a name.

    >>> from pippy.drivers.plan import make_schedule
    >>> from pippy.drivers.plan.language.instructions import Compute
    >>> from pippy.drivers.plan.orders.schedule import B, F, WorkerOrders
    >>> def alone(placement, chunks):
    ...     return WorkerOrders([[Compute(op, 0, chunk) for chunk in range(chunks) for op in (F, B)]], memory=[1])
    >>> register("alone", alone)
    >>> [str(compute) for compute in make_schedule("alone", workers=1, chunks=2).orders[0]]
    ['F0.0', 'B0.0', 'F0.1', 'B0.1']
    >>> del REGISTRY["alone"]
    """
    require("name", name, str, "give the name that make_schedule is to know")
    require("schedule", schedule, Callable, "give a function of a placement and a number of chunks")  # type: ignore[arg-type]
    if name in REGISTRY:
        raise ArgumentError(f"there is a schedule called {beginning(name)} already; take another name")
    REGISTRY[name] = RegisteredSchedule(schedule, placement, stages_per_worker, training)
