"""Makes a validated program from the name of a schedule and sizes."""

from collections.abc import Mapping, Sequence
from inspect import Parameter, signature

from pippy.drivers.plan.language.edges import shares
from pippy.drivers.plan.language.errors import ArgumentError, UnknownScheduleError, beginning, require
from pippy.drivers.plan.language.placement import Placement, make_placement, require_count
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.orders.registry import REGISTRY, RegisteredSchedule, register
from pippy.drivers.plan.orders.schedule import WorkerOrders, side_by_side
from pippy.drivers.plan.passes.rewrites import Checkpoint, add_recompute, in_slices
from pippy.drivers.plan.proofs.validate import validate
from pippy.drivers.plan.search import list_schedule

register("list", list_schedule)  # not in registry.py, because it uses the registry itself


def make_schedule(
    name: str,
    *,
    workers: int,
    chunks: int,
    stages_per_worker: int | Sequence[int] | None = None,
    placement: str | Mapping[int, int] | Placement | None = None,
    checkpoint: Checkpoint = "never",
    replicas: int = 1,
    slices: int = 1,
    **options: object,
) -> Program:
    """The program of a named schedule, validated: computations only, with communication implied.

    ``stages_per_worker`` is one number, or one for each worker. Its default is 1, or 2 for the V-shaped schedules.
    ``placement`` is "linear", "looped", "v", or a dict from stage to worker. Its default is the schedule's usual one.
    ``checkpoint`` says which forwards keep their inputs only and are computed again: "always", "except_last", "never", or a
    dict from stage to one of these. With ``replicas`` there are as many pipelines of ``workers`` workers each, and each takes
    its share of the micro-batches. With ``slices``, each of the ``chunks`` is a row of so many micro-batches, slices of its
    sequences. Other options go to the schedule.

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
    require("name", name, str, f"give one of {', '.join(REGISTRY)}")
    if name not in REGISTRY:
        raise UnknownScheduleError(f"there is no schedule called {beginning(name)}; take one of {', '.join(REGISTRY)}")
    entry = REGISTRY[name]
    require_count("chunks", chunks)
    require_count("slices", slices)
    placed = make_placement(
        workers,
        default_stages(entry, placement) if stages_per_worker is None else stages_per_worker,
        entry.placement if placement is None else placement,
    )
    refuse_unknown_options(name, entry, options)
    each = shares(chunks * slices, replicas, slices)
    parts = [orders_of(name, placed, len(share), slices, options) for share in each]
    result = side_by_side(parts, each) if replicas > 1 else parts[0]
    program = Program(
        schedule=name,
        placement=placed,
        chunks=chunks * slices,
        slices=slices,
        orders=tuple(map(tuple, result.orders)),
        backward=tuple(range(placed.stages)) if entry.training else (),
        memory=None if result.memory is None else tuple(result.memory),
        replicas=replicas,
    )
    program = add_recompute(program, checkpoint)
    validate(program)
    return program


def orders_of(name: str, placement: Placement, chunks: int, slices: int, options: Mapping[str, object]) -> WorkerOrders:
    """The orders of a schedule for one pipeline. Of slices, each stage holds more: those that it runs ahead."""
    part = REGISTRY[name].schedule(placement, chunks, **options)
    if not isinstance(part, WorkerOrders):
        raise ArgumentError(f"schedule {name} returned {beginning(part)}; it must return a WorkerOrders")
    if slices == 1:
        return part
    most = [len(placement.stages_of(worker)) for worker in range(placement.workers)]
    memory = part.memory and [
        min(limit + (slices - 1) * stages, chunks * stages) for limit, stages in zip(part.memory, most)
    ]
    return WorkerOrders([in_slices(order, slices) for order in part.orders], memory)


def default_stages(entry: RegisteredSchedule, placement: object) -> int:
    """The schedule's usual number, unless a dict or a Placement says it."""
    return entry.stages_per_worker if placement is None or isinstance(placement, str) else 1


def refuse_unknown_options(name: str, entry: RegisteredSchedule, options: Mapping[str, object]) -> None:
    parameters = list(signature(entry.schedule).parameters.values())[2:]  # after the placement and the chunks
    if any(parameter.kind == Parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for option in options:
        if option not in known:
            raise ArgumentError(
                f"{option}={beginning(options[option])}: {name} takes {', '.join(known) or 'no options'}"
            )
