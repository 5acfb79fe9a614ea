"""The schedules by name, and the one function that makes a program from a name and sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pippy.drivers.schedules.dualpipe_v import dualpipe_v
from pippy.drivers.schedules.errors import ArgumentError, UnknownScheduleError
from pippy.drivers.schedules.fill_drain import fill_drain
from pippy.drivers.schedules.forward_only import forward_only
from pippy.drivers.schedules.interleaved import interleaved_1f1b
from pippy.drivers.schedules.looped_bfs import looped_bfs
from pippy.drivers.schedules.one_f_one_b import one_f_one_b
from pippy.drivers.schedules.placement import Placement, make_placement, require_count
from pippy.drivers.schedules.plan import Plan, Schedule
from pippy.drivers.schedules.program import Program
from pippy.drivers.schedules.validate import validate
from pippy.drivers.schedules.zb_h1 import zb_h1
from pippy.drivers.schedules.zb_h2 import zb_h2
from pippy.drivers.schedules.zb_v import zb_v


@dataclass(frozen=True)
class Entry:
    """A schedule, how it is placed and how many stages a worker gets unless the user says, and whether it trains."""

    schedule: Schedule
    placement: str = "linear"
    stages_per_worker: int = 1
    training: bool = True


REGISTRY = {
    "fill_drain": Entry(fill_drain),
    "1f1b": Entry(one_f_one_b),
    "interleaved_1f1b": Entry(interleaved_1f1b, "looped"),
    "looped_bfs": Entry(looped_bfs, "looped"),
    "zb_h1": Entry(zb_h1),
    "zb_h2": Entry(zb_h2),
    "zb_v": Entry(zb_v, "v", stages_per_worker=2),
    "dualpipe_v": Entry(dualpipe_v, "v", stages_per_worker=2),
    "forward_only": Entry(forward_only, training=False),
}


def register(
    name: str, schedule: Schedule, placement: str = "linear", stages_per_worker: int = 1, training: bool = True
) -> None:
    """Make a schedule of your own known by name.

    >>> from pippy.drivers.schedules.plan import F, B
    >>> from pippy.drivers.schedules.instructions import Compute
    >>> def alone(placement: Placement, chunks: int) -> Plan:
    ...     return Plan([[Compute(op, 0, chunk) for chunk in range(chunks) for op in (F, B)]], memory=[1])
    >>> register("alone", alone)
    >>> [str(compute) for compute in make_schedule("alone", workers=1, chunks=2).orders[0]]
    ['F0.0', 'B0.0', 'F0.1', 'B0.1']
    >>> del REGISTRY["alone"]
    """
    if name in REGISTRY:
        raise ArgumentError(f"there is a schedule called {name!r} already; take another name")
    REGISTRY[name] = Entry(schedule, placement, stages_per_worker, training)


def make_schedule(
    name: str,
    *,
    workers: int,
    chunks: int,
    stages_per_worker: int | Sequence[int] | None = None,
    placement: str | Mapping[int, int] | Placement | None = None,
    **options: object,
) -> Program:
    """The program of a named schedule, validated: computations only, with communication implied.

    ``stages_per_worker`` is one number, or one for each worker; left out it is 1, or 2 for the V-shaped schedules. ``placement``
    is "linear", "looped", "v", or a dict from stage to worker; left out it is what the schedule is made for. Further options are
    the schedule's own.

    >>> print(make_schedule("1f1b", workers=2, chunks=1))
    pippy program 1
    schedule 1f1b
    workers 2
    stages 2
    chunks 1
    placement 0 1
    backward all
    memory 1 1
    edges chain
    communication implied
    worker 0
      F0.0
      B0.0
    worker 1
      F1.0
      B1.0
    <BLANKLINE>
    """
    if name not in REGISTRY:
        raise UnknownScheduleError(f"there is no schedule called {name!r}; take one of {', '.join(REGISTRY)}")
    entry = REGISTRY[name]
    require_count("chunks", chunks)
    placed = make_placement(
        workers,
        default_stages(entry, placement) if stages_per_worker is None else stages_per_worker,
        entry.placement if placement is None else placement,
    )
    plan = entry.schedule(placed, chunks, **options)
    program = Program(
        schedule=name,
        placement=placed,
        chunks=chunks,
        orders=tuple(map(tuple, plan.orders)),
        backward=tuple(range(placed.stages)) if entry.training else (),
        memory=None if plan.memory is None else tuple(plan.memory),
    )
    validate(program)
    return program


def default_stages(entry: Entry, placement: object) -> int:
    """A dict or a Placement says itself how many stages each worker has."""
    return entry.stages_per_worker if placement is None or isinstance(placement, str) else 1
