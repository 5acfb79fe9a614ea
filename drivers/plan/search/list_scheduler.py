"""The list scheduler: the best order that it finds for given costs and memory.

It tries (1) each named schedule that works on the placement and fits the memory, (2) a greedy order for each of a few rules,
and (3) for tiny programs, all orders that could be better. So it is never worse than a named schedule. For tiny programs it
finds the optimum of the orders whose backwards are all whole or all in halves. Those are the best, unless a whole backward
costs less than its halves.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

from pippy.drivers.plan.cost.costs import Costs, Number
from pippy.drivers.plan.cost.simulate import simulate_with
from pippy.drivers.plan.language.edges import Edge
from pippy.drivers.plan.language.errors import ArgumentError, PlacementError, beginning, require
from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.placement import Placement, is_count
from pippy.drivers.plan.language.program import Program, peak_live
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.orders.schedule import WorkerOrders
from pippy.drivers.plan.search.exhaustive import Orders, search_all
from pippy.drivers.plan.search.partial_schedule import PartialSchedule, SearchProblem

TINY = 16  # with up to this many computations, all orders are tried; their number grows faster than exponentially


@dataclass(frozen=True)
class Rule:
    """Which pass a worker starts first, of those that it could start at the same time.

    ``priority`` ranks the kinds of passes. ``patient`` lets a weight half wait if it would delay what other workers wait for.
    ``memory_share`` is how much of the memory to fill, because too many forwards make the first backwards late.
    """

    priority: str
    patient: bool
    memory_share: float


RULES = [Rule(*choice) for choice in product(("BIFW", "FBIW", "BIWF"), (False, True), (1.0, 0.75, 0.5))]


def list_schedule(
    placement: Placement,
    chunks: int,
    *,
    costs: Costs | None = None,
    memory: int | Sequence[int] | None = None,
    halves: bool = True,
    edges: Iterable[Edge] | None = None,
    added: Iterable[tuple[str, ...]] = (),
) -> WorkerOrders:
    """The order with the shortest makespan that is found for these costs and this placement.

    ``memory`` limits the stage-micro-batches: one number for all workers, or one for each. ``halves`` allows backwards in
    halves.

    >>> from pippy.drivers.plan import make_schedule, simulate
    >>> program = make_schedule("list", workers=4, chunks=8, memory=4)
    >>> simulate(program).makespan, program.peak_live
    (27.0, (4, 4, 4, 4))
    """
    require("costs", Costs() if costs is None else costs, Costs, "give Costs(forward=..., ...)")
    workers = placement.workers
    program = Program(
        schedule="list",
        placement=placement,
        chunks=chunks,
        orders=((),) * workers,
        backward=tuple(range(placement.stages)),
        edges=None if edges is None else tuple(edges),
        added=tuple(added),
    )
    limits = memory_limits(placement, chunks, memory)
    problems = [
        SearchProblem(program, costs or Costs(), limits, form) for form in ((True, False) if halves else (False,))
    ]
    tried = [
        *(
            (simulate_with(program.with_orders(orders), costs or Costs()).makespan, orders)
            for orders in named_orders(placement, chunks, limits, halves)
        ),
        *(greedy(problem, rule) for problem in problems for rule in RULES),
    ]
    makespan, best = min(tried, key=itemgetter(0))
    for problem in problems:
        if len(problem.ops) * placement.stages * chunks <= TINY:
            makespan, best = search_all(problem, makespan, best)
    return WorkerOrders(best, limits)


def memory_limits(placement: Placement, chunks: int, memory: int | Sequence[int] | None) -> list[int]:
    workers = range(placement.workers)
    if memory is None:
        return [chunks * len(placement.stages_of(worker)) for worker in workers]
    limits = list(memory) if isinstance(memory, Sequence) else [memory] * len(workers)
    if len(limits) != len(workers):
        raise ArgumentError(
            f"memory={memory} has {len(limits)} limits for {len(workers)} workers; give one, or one each"
        )
    for worker, limit in enumerate(limits):
        least = len(placement.stages_of(worker))
        if not is_count(limit, least):
            raise ArgumentError(
                f"memory={beginning(memory)} leaves worker {worker} no room for one micro-batch in each of its stages; "
                f"give it at least {least}"
            )
    return limits


def named_orders(placement: Placement, chunks: int, limits: Sequence[int], halves: bool) -> Iterator[Orders]:
    """The orders of the named schedules that work on this placement and fit into this memory."""
    for entry in REGISTRY.values():
        if entry.schedule is list_schedule or not entry.training:
            continue
        try:
            result = entry.schedule(placement, chunks)
        except PlacementError:
            continue
        split = any(compute.op == Op.BACKWARD_INPUT for order in result.orders for compute in order)
        peaks = [peak_live(order, frozenset(range(placement.stages))) for order in result.orders]
        if (halves or not split) and all(peak <= limit for peak, limit in zip(peaks, limits)):
            yield result.orders


Ranked = tuple[Number, int, int, int, Compute]


def greedy(problem: SearchProblem, rule: Rule) -> tuple[Number, Orders]:
    """Always start the pass that can start first. Of those that can start at the same time, the rule chooses."""
    partial = PartialSchedule(problem, rule.memory_share)
    ranked = {worker: rank(partial, worker, rule) for worker in range(partial.workers)}
    while earliest := min((best for best in ranked.values() if best), default=None):
        start, _, _, worker, compute = earliest
        for touched in {worker, *partial.add(worker, compute, start)}:
            ranked[touched] = rank(partial, touched, rule)
    return partial.bound, partial.orders


def rank(partial: PartialSchedule, worker: int, rule: Rule) -> Ranked | None:
    """What the worker should do next, as a tuple to compare: the start, the priority, the deeper stage first."""
    options = list(partial.options(worker))
    if rule.patient:
        options = [option for option in options if not holds_up(partial, option, options)]
    return min(
        ((start, rule.priority.index(compute.op), -compute.stage, worker, compute) for start, compute in options),
        default=None,
    )


def holds_up(
    partial: PartialSchedule, option: tuple[Number, Compute], options: Sequence[tuple[Number, Compute]]
) -> bool:
    """Whether a weight half would still run when a pass that other workers wait for could start."""
    start, compute = option
    if compute.op != Op.BACKWARD_WEIGHT:
        return False
    end = start + partial.problem.costs.compute(compute)
    return any(other.op != Op.BACKWARD_WEIGHT and begin < end for begin, other in options)
