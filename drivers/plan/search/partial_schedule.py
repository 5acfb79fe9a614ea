"""A schedule that is being built: the passes that each worker could do next, and when each would start."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy

from pippy.drivers.plan.cost.costs import Costs, Number
from pippy.drivers.plan.language.edges import Pass, produced_by
from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.program import Program
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
