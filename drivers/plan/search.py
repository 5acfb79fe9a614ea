"""The list scheduler: the best order that it finds for given costs and memory.

It tries (1) each named schedule that works on the placement and fits the memory, (2) a greedy order for each of a few rules,
and (3) for tiny programs, all orders that could be better. So it is never worse than a named schedule. For tiny programs it
finds the optimum of the orders whose backwards are all whole or all in halves. Those are the best, unless a whole backward
costs less than its halves.

Of all orders, each is written in one way: its passes in the order of their starts, and each starts as early as it can. A
beginning is dropped as soon as no continuation can beat the best known makespan (branch and bound).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

from pippy.drivers.plan.cost.simulate import Costs, Number, simulate_with
from pippy.drivers.plan.language.edges import Edge, Pass, produced_by
from pippy.drivers.plan.language.errors import ArgumentError, PlacementError, beginning, require
from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.placement import Placement, is_count
from pippy.drivers.plan.language.program import Program, peak_live
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.orders.schedule import WorkerOrders
from pippy.drivers.plan.proofs.values import takers

UNHALVED = (Op.FORWARD, Op.BACKWARD)
HALVES = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


class SearchProblem:
    """What to schedule: an empty program, its costs, each worker's memory, and whether backwards come in halves.

    >>> from pippy.drivers.plan import make_schedule
    >>> problem = SearchProblem(make_schedule("1f1b", workers=1, chunks=3), Costs(), memory=[2], halves=True)
    >>> problem.work(0)
    9.0
    """

    def __init__(self, program: Program, costs: Costs, memory: Sequence[int], halves: bool) -> None:
        self.program = program
        self.costs = costs.resolve(program)
        self.memory = memory
        self.ops = HALVES if halves else UNHALVED
        self.worker_of = program.placement.worker_of
        self.inputs: dict[Pass, list[str]] = defaultdict(list)
        self.outputs: dict[Pass, list[tuple[str, list[int]]]] = defaultdict(list)
        self.sum_of, self.summands = program.sum_of, program.summands
        for edge in program.flow:
            to = takers(program, edge)
            self.outputs[edge.source].append((edge.value, to))
            for target in edge.targets:
                if edge.value not in self.sum_of or self.worker_of[target.stage] not in to:  # else the sum comes
                    self.inputs[target].append(edge.value)

    def work(self, worker: int) -> Number:
        """How long a worker computes in all."""
        stages = self.program.placement.stages_of(worker)
        return sum(self.costs.stages[op][stage] for op in self.ops for stage in stages) * self.program.chunks


class PartialSchedule:
    """The beginning of a schedule: its passes, and the state of each worker after them.

    All micro-batches are alike, so each stage takes them in order. Any other schedule becomes such a one if its micro-batches
    are renumbered.

    >>> from pippy.drivers.plan import make_schedule
    >>> partial = PartialSchedule(SearchProblem(make_schedule("1f1b", workers=1, chunks=3), Costs(), memory=[2], halves=True))
    >>> partial.add(0, Compute(Op.FORWARD, 0, 0), start=0)
    []
    >>> [f"{compute} at {start}" for start, compute in partial.options(0)]
    ['F0.1 at 1.0', 'I0.0 at 1.0']
    """

    def __init__(self, problem: SearchProblem, memory_share: float = 1.0) -> None:
        self.problem = problem
        self.workers = workers = problem.program.workers
        self.memory = [
            max(len(problem.program.placement.stages_of(worker)), round(limit * memory_share))
            for worker, limit in enumerate(problem.memory)
        ]
        self.orders: list[list[Compute]] = [[] for _ in range(workers)]
        self.done: dict[tuple[Op, int], int] = {
            (op, stage): 0 for op in problem.ops for stage in range(problem.program.stages)
        }
        self.free_at: list[Number] = [0] * workers
        self.left: list[Number] = [problem.work(worker) for worker in range(workers)]
        self.channel_free_at: dict[tuple[int, int], Number] = {}
        self.ready_at: dict[tuple[str, int, int], Number] = {}

    def copy(self) -> "PartialSchedule":
        twin = copy(self)
        twin.orders = [list(order) for order in self.orders]
        twin.done = dict(self.done)
        twin.free_at = list(self.free_at)
        twin.left = list(self.left)
        twin.channel_free_at = dict(self.channel_free_at)
        twin.ready_at = dict(self.ready_at)
        return twin

    @property
    def complete(self) -> bool:
        return all(done == self.problem.program.chunks for done in self.done.values())

    @property
    def bound(self) -> Number:
        """A lower bound: no continuation ends before this."""
        return max(free + left for free, left in zip(self.free_at, self.left))

    def options(self, worker: int) -> Iterator[tuple[Number, Compute]]:
        """The passes that a worker could do next, each with its start."""
        for stage in self.problem.program.placement.stages_of(worker):
            before = self.problem.program.chunks
            for op in self.problem.ops:
                chunk = self.done[op, stage]
                if chunk < before:
                    compute = Compute(op, stage, chunk)
                    start = self.start(worker, compute)
                    if start is not None and (op != Op.FORWARD or self.has_room(worker, compute)):
                        yield start, compute
                before = chunk  # a pass cannot be ahead of the pass that it needs

    def start(self, worker: int, compute: Compute) -> Number | None:
        """When the pass would start. None if something that it needs was not sent yet."""
        start = self.free_at[worker]
        done = produced_by(compute)
        for value in self.problem.inputs.get(done, ()) if done else ():
            ready = self.ready_at.get((value, compute.microbatch, worker))
            if ready is None:
                return None
            start = max(start, ready)
        return start

    def has_room(self, worker: int, forward: Compute) -> bool:
        """Whether, after this forward, the worker could still finish its micro-batches one by one, the oldest first.

        Otherwise memory could fill up with micro-batches none of which can go on.
        """
        stages = self.problem.program.placement.stages_of(worker)
        last = self.problem.ops[-1]
        begun = {stage: self.done[Op.FORWARD, stage] + (stage == forward.stage) for stage in stages}
        ended = {stage: self.done[last, stage] for stage in stages}
        held = sum(begun.values()) - sum(ended.values())
        for chunk in range(min(ended.values()), max(begun.values())):
            to_come = sum(begun[stage] <= chunk for stage in stages)
            if held + to_come > self.memory[worker]:
                return False
            held -= sum(ended[stage] <= chunk < begun[stage] for stage in stages)
        return True

    def add(self, worker: int, compute: Compute, start: Number) -> list[int]:
        """Let the worker do one of its options. Returns the other workers that receive something from it."""
        cost = self.problem.costs.compute(compute)
        end = start + cost
        self.orders[worker].append(compute)
        self.done[compute.op, compute.stage] += 1
        self.free_at[worker] = end
        self.left[worker] -= cost
        done = produced_by(compute)
        touched = []
        for value, workers in self.problem.outputs.get(done, ()) if done else ():
            self.ready_at[value, compute.microbatch, worker] = end
            sent = self.problem.sum_of.get(value, value)
            summands = self.problem.summands.get(sent, (value,))
            if all((each, compute.microbatch, worker) in self.ready_at for each in summands):
                for to in workers:
                    self.send(sent, compute.microbatch, worker, to, end)
                touched += workers
        return touched

    def send(self, value: str, chunk: int, source: int, to: int, now: Number) -> None:
        costs = self.problem.costs
        gone = max(now, self.channel_free_at.get((source, to), 0)) + costs.occupied[value]
        self.channel_free_at[source, to] = gone
        self.ready_at[value, chunk, to] = gone + costs.latency[value]


Orders = Sequence[Sequence[Compute]]


def search_all(problem: SearchProblem, makespan: Number, orders: Orders) -> tuple[Number, Orders]:
    """The shortest makespan, and orders that have it. If none is shorter than that of the given orders, those are returned.

    >>> from pippy.drivers.plan import Costs, make_schedule
    >>> program = make_schedule("fill_drain", workers=1, chunks=2)
    >>> search_all(SearchProblem(program, Costs(), memory=[1], halves=False), 99.0, [])[0]
    6.0
    """
    beginnings: list[tuple[Number, PartialSchedule]] = [(0, PartialSchedule(problem))]
    while beginnings:
        latest, partial = beginnings.pop()
        if partial.bound >= makespan:
            continue
        if partial.complete:
            makespan, orders = partial.bound, partial.orders
            continue
        for worker in range(partial.workers):
            for start, compute in partial.options(worker):
                if start >= latest:
                    further = partial.copy()
                    further.add(worker, compute, start)
                    beginnings.append((start, further))
    return makespan, orders


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
    limits = live_limits(placement, chunks, memory, "memory=")
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


def live_limits(placement: Placement, chunks: int, given: int | Sequence[int] | None, name: str) -> list[int]:
    """The most stage-micro-batches of each worker: one number for all, one for each, or all there are.

    >>> live_limits(Placement((0, 1)), 4, [1, 2], "memory="), live_limits(Placement((0, 1)), 4, None, "memory=")
    ([1, 2], [4, 4])
    """
    leasts = [len(placement.stages_of(worker)) for worker in range(placement.workers)]
    if given is None:
        return [chunks * least for least in leasts]
    limits = list(given) if isinstance(given, Sequence) else [given] * len(leasts)
    if len(limits) != len(leasts):
        raise ArgumentError(
            f"{name}{beginning(given)} has {len(limits)} limits for {len(leasts)} workers; give one, or one each"
        )
    for worker, (limit, least) in enumerate(zip(limits, leasts)):
        if not is_count(limit, least):
            raise ArgumentError(
                f"{name}{beginning(given)} leaves worker {worker} no room for one micro-batch in each of its stages; "
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
