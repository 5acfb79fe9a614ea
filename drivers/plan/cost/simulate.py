"""Simulates a program: a clock for each worker and each channel, and nothing is computed.

Where workers are on several hosts, all values that a host sends to others go over one line, one at a time, and all that it
takes go over another. So a transfer between hosts begins when the sender's line out and the receiver's line in are free.
Workers are gone through in the order of their clocks, so that values come onto a line as they are sent.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from pippy.drivers.plan.cost.costs import Costs, Number, PerEdge, PerStage
from pippy.drivers.plan.cost.timeline import Span, Timeline
from pippy.drivers.plan.language.drawn import Drawn
from pippy.drivers.plan.language.instructions import Compute, Instruction, MicrobatchValue
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.communicate import add_communication
from pippy.drivers.plan.proofs.validate import validate
from pippy.drivers.plan.proofs.waits import DryRun, Transfers


@dataclass(frozen=True)
class Idle:
    """How long a worker idles: before its first computation, after its last, and in between, by the worker it waits for.

    >>> Idle(fill=1.0, drain=2.0, waiting={2: 6.0}).total
    9.0
    """

    fill: Number
    drain: Number
    waiting: dict[int, Number]

    @property
    def total(self) -> Number:
        return self.fill + self.drain + sum(self.waiting.values())


@dataclass(frozen=True)
class Simulation(Drawn):
    """The result of a simulation: the timeline, why each worker idles, and the most stage-micro-batches that it holds.

    >>> from pippy.drivers.plan import make_schedule
    >>> result = simulate(make_schedule("fill_drain", workers=2, chunks=3))
    >>> result.makespan, result.idle, result.peak_live
    (12.0, (3.0, 3.0), (3, 3))
    >>> result
    <Simulation: 2 workers, makespan 12, idle 25 %, at most 3 live>
    """

    timeline: Timeline
    idle_parts: tuple[Idle, ...]
    peak_live: tuple[int, ...]

    def __repr__(self) -> str:
        workers, total = len(self.idle_parts), float(self.makespan) * len(self.idle_parts)
        idle = f"{float(sum(self.idle)) / total if total else 0:.0%}".replace("%", " %")
        return (
            f"<Simulation: {workers} worker{'s' * (workers != 1)}, makespan {float(self.makespan):g}, idle {idle}, "
            f"at most {max(self.peak_live, default=0)} live>"
        )

    @property
    def makespan(self) -> Number:
        return self.timeline.makespan

    @property
    def idle(self) -> tuple[Number, ...]:
        """How long each worker does nothing, until the last worker is done."""
        return tuple(parts.total for parts in self.idle_parts)


def simulate(
    program: Program,
    forward: PerStage = 1.0,
    backward_input: PerStage = 1.0,
    backward_weight: PerStage = 1.0,
    *,
    backward: PerStage | None = None,
    latency: PerEdge = 0,
    size: PerEdge = 0,
    bandwidth: Number = 1,
    recompute: PerStage | None = None,
) -> Simulation:
    """Simulate a valid program. ``Costs`` says what the costs mean. A sender never waits for its channel.

    >>> from pippy.drivers.plan import make_schedule
    >>> result = simulate(make_schedule("1f1b", workers=4, chunks=8))
    >>> result.makespan, result.idle, result.peak_live
    (33.0, (9.0, 9.0, 9.0, 9.0), (4, 3, 2, 1))
    >>> result.idle_parts[1]
    Idle(fill=1.0, drain=2.0, waiting={2: 6.0})
    """
    costs = Costs(forward, backward_input, backward_weight, backward, latency, size, bandwidth, recompute)
    return simulate_with(program, costs)


def simulate_with(program: Program, costs: Costs) -> Simulation:
    """Simulate with costs that are given as one object.

    >>> from pippy.drivers.plan import make_schedule
    >>> simulate_with(make_schedule("1f1b", workers=1, chunks=2), Costs(backward=1.5)).makespan
    5.0
    """
    validate(program)
    simulator = Simulator(program if program.lowered else add_communication(program), costs)
    return Simulation(simulator.timeline(), simulator.idle_parts(), program.peak_live)


class Simulator:
    """The time on every worker and in every channel while a lowered program runs."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.costs, self.from_before = costs.resolve(program), program.going_on
        self.now: list[Number] = [0] * program.workers
        self.spans: list[list[Span]] = [[] for _ in program.orders]
        self.waited: list[dict[int, Number]] = [
            defaultdict(int) for _ in program.orders
        ]  # by each before a computation
        self.waiting: list[dict[int, Number]] = [
            defaultdict(int) for _ in program.orders
        ]  # since the latest computation
        self.free_at: dict[object, Number] = defaultdict(int)  # when each channel is, or each line of a host
        self.arrivals: dict[tuple[MicrobatchValue, int, int], Number] = {}  # of values, from a worker at another
        self.program, self.hosts = program, program.hosts
        for worker, instruction in self.in_turn() if self.hosts else self.in_stretches():
            self.step(worker, instruction)

    def in_stretches(self) -> Iterator[tuple[int, Instruction]]:
        """All instructions, in an order in which they can run."""
        for worker, first, end in DryRun(self.program, Transfers(self.program).waits()).stretches:
            for instruction in self.program.orders[worker][first:end]:
                yield worker, instruction

    def in_turn(self) -> Iterator[tuple[int, Instruction]]:
        """All instructions, always the next one of the worker whose clock is behind those of all others that need not wait."""
        orders, done = self.program.orders, [0] * self.program.workers
        waiting: set[tuple[MicrobatchValue, int, int]] = set()
        turns: list[tuple[Number, int]] = [(0, worker) for worker in range(self.program.workers)]
        heapify(turns)
        while turns:
            _, worker = heappop(turns)
            if done[worker] == len(orders[worker]):
                continue
            instruction = orders[worker][done[worker]]
            kind = instruction.kind
            if kind.receives_from and kind.gives:
                taken = kind.gives(instruction), kind.receives_from(instruction), worker
                if taken not in self.arrivals and taken[0][0] not in self.from_before:
                    waiting.add(taken)
                    continue
            yield worker, instruction
            done[worker] += 1
            heappush(turns, (self.now[worker], worker))
            if kind.sends_to and kind.takes:
                sent = kind.takes(instruction), worker, kind.sends_to(instruction)
                if sent in waiting:
                    waiting.remove(sent)
                    heappush(turns, (self.now[sent[2]], sent[2]))

    def step(self, worker: int, instruction: Instruction) -> None:
        if isinstance(instruction, Compute):
            start, waiting = self.now[worker], self.waiting[worker]
            while waiting:
                source, waited = waiting.popitem()
                self.waited[worker][source] += waited
            self.now[worker] = start + self.costs.compute(instruction)
            self.spans[worker].append(Span(instruction, start, self.now[worker]))
            return
        kind = instruction.kind
        if kind.sends_to and kind.takes:
            self.send(worker, kind.takes(instruction), kind.sends_to(instruction))
        elif kind.receives_from and kind.gives:
            self.receive(worker, kind.gives(instruction), kind.receives_from(instruction))

    def send(self, worker: int, key: MicrobatchValue, to: int) -> None:
        value = key[0]
        if self.hosts and self.hosts[worker] == self.hosts[to]:
            self.arrivals[key, worker, to] = self.now[worker]
            return
        lines: tuple[object, ...] = ((worker, to),)
        if self.hosts:
            lines = ("out", self.hosts[worker]), ("in", self.hosts[to])
        begin = max(self.now[worker], *(self.free_at[line] for line in lines))
        end = begin + self.costs.occupied.get(value, 0)
        self.free_at.update(dict.fromkeys(lines, end))
        self.arrivals[key, worker, to] = end + self.costs.latency.get(value, 0)

    def receive(self, worker: int, key: MicrobatchValue, source: int) -> None:
        arrival = 0 if key[0] in self.from_before else self.arrivals[key, source, worker]
        if arrival > self.now[worker]:
            if self.spans[worker]:  # else it is fill
                self.waiting[worker][source] += arrival - self.now[worker]
            self.now[worker] = arrival

    def timeline(self) -> Timeline:
        return Timeline(tuple(map(tuple, self.spans)))

    def idle_parts(self) -> tuple[Idle, ...]:
        end = self.timeline().makespan
        return tuple(
            Idle(fill=spans[0].start, drain=end - spans[-1].end, waiting=dict(sorted(waited.items())))
            for spans, waited in zip(self.spans, self.waited)
        )
