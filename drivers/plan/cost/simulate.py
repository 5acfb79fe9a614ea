"""Simulates a program: a clock for each worker and each channel, and nothing is computed.

Where workers are on several hosts, all values that a host sends to others go over one line, one at a time, and all that it
takes go over another. So a transfer between hosts begins when the sender's line out and the receiver's line in are free.
Workers are gone through in the order of their clocks, so that values come onto a line as they are sent.

How long computations and transfers take, in any unit of time.

A single number is the cost for one *device*: what a worker spends on one micro-batch, all its stages together, if the
model is spread evenly. A stage then costs ``number * workers / stages``: with v stages on each worker, 1/v of the
number. So schedules with different numbers of stages a worker compare fairly: they run the same model. A sequence or
a dict gives each *stage's* own cost instead.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import isfinite
from numbers import Real

from pippy.drivers.plan.language.errors import ArgumentError, beginning
from pippy.drivers.plan.language.instructions import KINDS, Compute, Instruction, InstructionKey, MicrobatchValue
from pippy.drivers.plan.language.program import Drawn, Program
from pippy.drivers.plan.passes.communicate import add_communication
from pippy.drivers.plan.proofs.validate import validate

Number = float | Fraction
PerStage = Number | Sequence[Number] | Mapping[int, Number]
PerEdge = Number | Mapping[str, Number]


@dataclass(frozen=True)
class Costs:
    """The costs of passes, and of moving a value between workers: ``size / bandwidth`` in a channel, then ``latency``.

    A channel moves one value at a time. In a program on several hosts, these are the costs between two of them: a host
    sends one value at a time to others, and takes one at a time; within a host, a value takes no time.

    ``backward`` is the cost of a whole backward; left out, it is that of its two halves. ``recompute`` is that of a forward
    which is computed again; left out, it is that of the forward.

    >>> from pippy.drivers.plan import make_schedule
    >>> program = make_schedule("interleaved_1f1b", workers=2, chunks=2, stages_per_worker=2)
    >>> from pippy.drivers.plan.language.instructions import Op
    >>> Costs(forward=1.0).resolve(program).compute(Compute(Op.FORWARD, 3, 0))
    0.5
    >>> Costs(forward=[1.0, 2.0, 3.0, 4.0]).resolve(program).compute(Compute(Op.FORWARD, 3, 0))
    4.0
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    latency: PerEdge = 0
    size: PerEdge = 0
    bandwidth: Number = 1
    recompute: PerStage | None = None

    def resolve(self, program: Program) -> "ResolvedCosts":
        """The costs of every stage and edge of a program; one that is missing or negative is refused."""
        require_cost("bandwidth", self.bandwidth)
        if self.bandwidth == 0:
            raise ArgumentError(f"bandwidth={beginning(self.bandwidth)} must be above zero")
        costs = {
            name: per_stage(name, cost, program)
            for name in ("backward_input", "backward_weight", "backward", "forward", "recompute")
            if (cost := getattr(self, name)) is not None
        }
        sizes = per_edge("size", self.size, program)
        return ResolvedCosts(
            {key: kind.cost(costs.get) for key, kind in KINDS.items() if kind.cost},
            per_edge("latency", self.latency, program),
            {value: size / self.bandwidth if size else 0 for value, size in sizes.items()},
        )


@dataclass(frozen=True)
class ResolvedCosts:
    """A number for each pass of each stage and each edge: ``occupied`` is how long a value keeps its channel busy."""

    stages: dict[InstructionKey, Sequence[Number]]
    latency: dict[str, Number]
    occupied: dict[str, Number]

    def compute(self, compute: Compute) -> Number:
        return self.stages[compute.op][compute.stage]


def per_stage(name: str, given: PerStage, program: Program) -> list[Number]:
    if isinstance(given, Mapping):
        missing = [stage for stage in range(program.stages) if stage not in given]
        if missing:
            raise ArgumentError(
                f"{name}={beginning(given)} has no cost for stage {missing[0]}; give one for each stage"
            )
        costs = [given[stage] for stage in range(program.stages)]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != program.stages:
            raise ArgumentError(
                f"{name}={beginning(given)} has {len(given)} costs for {program.stages} stages; give one for each"
            )
        costs = list(given)
    else:
        require_cost(name, given)
        costs = [given * program.placement.workers / program.stages] * program.stages
    for cost in costs:
        require_cost(name, cost)
    return costs


def per_edge(name: str, given: PerEdge, program: Program) -> dict[str, Number]:
    values = [edge.value for edge in program.flow]
    if not isinstance(given, Mapping):
        require_cost(name, given)
        return dict.fromkeys(values, given)
    for value in values:
        if value not in given:
            raise ArgumentError(f"{name}={beginning(given)} has no entry for edge {value}; give one for each edge")
        require_cost(name, given[value])
    return {value: given[value] for value in values}


def require_cost(name: str, cost: object) -> None:
    if isinstance(cost, bool) or not isinstance(cost, Real) or not isfinite(cost) or cost < 0:
        raise ArgumentError(f"{name}={beginning(cost)} must be a number of at least 0")


@dataclass(frozen=True, slots=True)
class Span:
    """One computation of a worker, from start to end.

    >>> from pippy.drivers.plan.orders.schedule import F
    >>> Span(Compute(F, 0, 0), 1.0, 2.5).duration
    1.5
    """

    compute: Compute
    start: Number
    end: Number

    @property
    def duration(self) -> Number:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline(Drawn):
    """Each worker's spans, in order of time.

    >>> from pippy.drivers.plan.orders.schedule import F
    >>> Timeline([[Span(Compute(F, 0, 0), 1.0, 2.5)]]).makespan
    2.5
    """

    spans: Sequence[Sequence[Span]]

    def __repr__(self) -> str:
        """
        >>> Timeline([[], []])
        <Timeline: 2 workers, 0 passes, makespan 0>
        """
        workers = "1 worker" if len(self.spans) == 1 else f"{len(self.spans)} workers"
        return f"<Timeline: {workers}, {sum(map(len, self.spans))} passes, makespan {float(self.makespan):g}>"

    def __post_init__(self) -> None:
        for worker, spans in enumerate(self.spans):
            clock: Number = 0
            for span in spans:
                if span.start < clock or span.end < span.start:
                    raise ArgumentError(
                        f"worker {worker} runs {span.compute} from {span.start} to {span.end}, when it is {clock}; "
                        "give each worker's spans in order of time, from 0, without overlap"
                    )
                clock = span.end

    @property
    def makespan(self) -> Number:
        return max((spans[-1].end for spans in self.spans if spans), default=0)


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
        # How long a worker waited, by the worker that it waited for: before a computation, and since the latest one.
        self.waited: list[dict[int, Number]] = [defaultdict(int) for _ in program.orders]
        self.waiting: list[dict[int, Number]] = [defaultdict(int) for _ in program.orders]
        self.free_at: dict[object, Number] = defaultdict(int)  # when each channel is, or each line of a host
        self.arrivals: dict[tuple[MicrobatchValue, int, int], Number] = {}  # of values, from a worker at another
        self.program, self.hosts = program, program.hosts
        for worker, instruction in self.in_turn():
            self.step(worker, instruction)

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
