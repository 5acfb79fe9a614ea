"""Programs and graphs that tests of plans are made of, and what programs compute."""

import random
from collections import Counter, defaultdict, deque
from dataclasses import replace
from typing import Any

from pippy.drivers.plan.language.edges import Edge, Pass, Replicated, scan_edge
from pippy.drivers.plan.language.instructions import (
    Add,
    Compute,
    Free,
    Instruction,
    Op,
    Payload,
    Receive,
    ReceiveExchanged,
    Reduce,
    Send,
    SendExchanged,
    parse_instruction,
)
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.language.scanner import Scanner


def edges_between(pairs: set[tuple[int, int]], backward: set[int]) -> list[Edge]:
    """A value of each stage for all later stages it is paired with, and a gradient back from each of those."""
    sources = sorted({source for source, _ in pairs})
    consumers = {source: sorted(to for first, to in pairs if first == source) for source in sources}
    up = [Edge(f"x_{a}", Pass("F", a), tuple(Pass("F", b) for b in consumers[a])) for a in sources]
    down = [
        Edge(f"g_{b}_{a}", Pass("B", b), (Pass("B", a),)) for a, b in sorted(pairs) if a in backward and b in backward
    ]
    return up + down


def with_random_graph(program: Program, rng: random.Random) -> Program:
    """The program for stages that form a chain with random skips, and for random replicated parameters."""
    stages = range(program.stages)
    pairs = {(a, b) for a in stages for b in stages if b == a + 1 or (a < b and rng.random() < 0.3)}
    backward = set(program.backward)
    if backward and rng.random() < 0.3:
        backward = {stage for stage in backward if stage >= rng.randrange(program.stages)}
    replicated = [
        Replicated(f"layer.{number}.weight", tuple(sorted(rng.sample(stages, rng.randint(1, min(3, program.stages))))))
        for number in range(rng.randrange(3))
    ]
    edges = edges_between(pairs, backward)
    return program.for_graph(edges, backward, replicated, added=added_of(edges, rng))


def added_of(edges: list[Edge], rng: random.Random) -> list[tuple[str, ...]]:
    """For each backward that takes several gradients: they are of one value, or of several values, or most of one."""
    takers = sorted({edge.targets for edge in edges if edge.source.phase == "B"})
    given = [[edge.value for edge in edges if edge.source.phase == "B" and edge.targets == taker] for taker in takers]
    for values in given:
        rng.shuffle(values)
        if len(values) > 2:
            del values[: rng.randrange(2)]
    return [tuple(values) for values in given if len(values) > 1 and rng.random() < 0.8]


def on_random_hosts(program: Program, rng: random.Random) -> Program:
    """The program with its workers on some hosts, or all on one."""
    count = rng.randint(1, program.workers)
    return replace(program, hosts=tuple(rng.randrange(count) for _ in range(program.workers)) if count > 1 else None)


# Programs in one line, for tests: workers are separated by bars, instructions by commas.


def edges(*texts: str) -> tuple[Edge, ...]:
    return tuple(scan_edge(Scanner(text)) for text in texts)


def build(orders: str, placement: tuple[int, ...], chunks: int = 1, **known: Any) -> Program:
    """A program; it is lowered if anything in it is no computation."""
    known = {"backward": tuple(range(len(placement))), **known}
    known["lowered"] = any(word in orders for word in ("send", "receive", "free", "reduce"))
    return Program("test", Placement(placement), chunks, instructions(orders), **known)


def instructions(orders: str) -> tuple[tuple[Instruction, ...], ...]:
    """Those of each worker."""
    return tuple(
        tuple(parse_instruction(text.strip()) for text in order.split(",") if text.strip())
        for order in orders.split("|")
    )


def marked(text: str) -> tuple[str, list[str]]:
    """A program in one line, and its faults: behind an instruction and an arrow stands what is wrong with it.

    >>> marked("F0.0 / B0.0 ← is computed twice | F1.0 / ← B1.0 is missing")
    ('F0.0, B0.0 | F1.0', ['worker 0, B0.0: is computed twice', 'worker 1, at the end: B1.0 is missing'])
    """
    orders: list[str] = []
    faults: list[str] = []
    for worker, part in enumerate(text.split("|")):
        marks = [[word.strip() for word in each.split("←")] for each in part.split("/")]
        orders.append(", ".join(instruction for instruction, *_ in marks if instruction))
        faults += [f"worker {worker}, {each or 'at the end'}: {wrong}" for each, *its in marks for wrong in its]
    return " | ".join(orders), faults


# What a program computes: it is executed on symbols instead of tensors, independent of validate and simulate. Two programs that
# compute equal outcomes compute the same numbers, up to the order in which gradients are summed.


class Impossible(Exception):
    """An instruction of the program needs a value that does not exist."""


class Blocked(Exception):
    """The worker has to wait."""


class Machine:
    """Workers with their own stores, joined by channels that deliver in order and never fill."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.terms: dict[Any, int] = {}
        self.stores: list[dict[Any, int]] = [{} for _ in program.orders]
        self.channels: dict[tuple[int, int], deque[tuple[Any, Any]]] = defaultdict(deque)
        self.forwards: dict[tuple[int, int, int], int] = {}
        self.inputs_only: dict[tuple[int, int, int], int] = {}  # forwards that have to be computed again
        self.halves: dict[tuple[int, int, int], int] = {}
        self.outputs: Counter[Any] = Counter()
        self.gradients: Counter[Any] = Counter()
        self.sums: Counter[Any] = Counter()
        self.arrived: dict[Any, list[Any]] = defaultdict(list)
        self.totals: dict[Any, list[Any]] = {}
        self.stages = {each.name: each.stages for each in program.sums}
        self.inputs: dict[Pass, list[str]] = defaultdict(list)
        self.makes: dict[Pass, list[str]] = defaultdict(list)
        self.maker = {edge.value: edge.source for edge in program.flow}
        for edge in program.flow:
            self.makes[edge.source].append(edge.value)
            for target in edge.targets:
                self.inputs[target].append(edge.value)

    def term(self, *parts: Any) -> int:
        return self.terms.setdefault(parts, len(self.terms))

    def fetch(self, worker: int, value: str, chunk: int) -> int:
        """An input: from the worker's own store, or from wherever it was made if communication is implied."""
        stores = [self.stores[worker]] if self.program.lowered else self.stores
        for store in stores:
            if (value, chunk) in store:
                return store[value, chunk]
        raise Impossible(value) if self.program.lowered else Blocked(value)

    def taken(self, worker: int, value: str, chunk: int) -> int:
        """An input, with all that is added to it."""
        found = self.fetch(worker, value, chunk)
        for each in () if self.program.lowered else self.program.summands.get(value, ())[1:]:
            found = self.term("sum", found, self.fetch(worker, each, chunk))
        return found

    def run_pass(self, worker: int, phase: Any, stage: int, chunk: int, *known: int) -> int:
        needed = [value for value in self.inputs.get(Pass(phase, stage), ()) if value not in self.program.sum_of]
        gone = [self.taken(worker, value, chunk) for value in needed]
        found = self.term(phase, stage, chunk, *known, *gone)
        for value in self.makes.get(Pass(phase, stage), ()):
            self.stores[worker][value, chunk] = self.term(value, found)
        return found

    def step(self, worker: int, instruction: Instruction) -> None:
        match instruction:
            case Compute(op, stage, chunk):
                self.compute(worker, op, stage, chunk)
            case Send(value, chunk, to):
                if (value, chunk) not in self.stores[worker]:
                    raise Impossible(value)
                self.channels[worker, to].append(((value, chunk), self.stores[worker][value, chunk]))
            case Receive(value, chunk, source):
                self.stores[worker][value, chunk] = self.pop(source, worker, (value, chunk))
            case Free(value, chunk):
                if self.stores[worker].pop((value, chunk), None) is None:
                    raise Impossible(value)
            case Add(value, chunk, into):
                store, keys = self.stores[worker], [(into, chunk), (value, chunk)]
                if any(key not in store for key in keys):
                    raise Impossible(value)
                store[into, chunk] = self.term("sum", *(store.pop(key) for key in keys))
            case SendExchanged(Payload.GRADIENTS, to, name):
                self.channels[worker, to].append((("gradients", name), self.own(worker, name)))
            case ReceiveExchanged(Payload.GRADIENTS, source, name):
                self.arrived[worker, name] += self.pop(source, worker, ("gradients", name))
            case Reduce(name):
                self.total(worker, name, sorted(self.own(worker, name) + self.arrived[worker, name]))
            case SendExchanged(Payload.SUM, to, name):
                if (worker, name) not in self.totals:
                    raise Impossible(name)
                self.channels[worker, to].append((("sum", name), self.totals[worker, name]))
            case SendExchanged(Payload.NOTES, to):
                noted = [
                    item for item in self.outputs.items() if item[0][0] == worker and item[0][1] in self.program.notes
                ]
                self.channels[worker, to].append(("notes", noted))
            case ReceiveExchanged(Payload.NOTES, source):
                self.sums["notes", worker, tuple(sorted(self.pop(source, worker, "notes")))] += 1
            case ReceiveExchanged(Payload.SUM, source, name):
                self.total(worker, name, self.pop(source, worker, ("sum", name)))

    def pop(self, source: int, worker: int, key: Any) -> Any:
        """Take what comes next from a worker, which must have this key."""
        channel = self.channels[source, worker]
        if not channel:
            raise Blocked(key)
        there, found = channel.popleft()
        if there != key:
            raise Impossible(key)
        return found

    def own(self, worker: int, name: str) -> list[Any]:
        """The gradients of a worker that are a part of a sum."""
        stages = self.stages.get(name, ())
        return [item for item in self.gradients.items() if item[0][0] == worker and item[0][1] in stages]

    def total(self, worker: int, name: str, parts: list[Any]) -> None:
        self.totals[worker, name] = parts
        self.sums[name, worker, tuple(parts)] += 1

    def compute(self, worker: int, op: Op, stage: int, chunk: int) -> None:
        here = (worker, stage, chunk)
        if op == Op.FORWARD:
            found = self.run_pass(worker, "F", stage, chunk)
            kept = self.inputs_only if (stage, chunk) in self.program.checkpointed else self.forwards
            kept[here] = found
            self.outputs[worker, stage, chunk, found] += 1
            return
        if op == Op.RECOMPUTE:
            if here not in self.inputs_only:
                raise Impossible(here)
            self.forwards[here] = self.inputs_only.pop(here)
            return
        if op != Op.BACKWARD_WEIGHT:
            if here not in self.forwards:
                raise Impossible(here)
            self.halves[here] = self.run_pass(worker, "B", stage, chunk, self.forwards[here])
        if op != Op.BACKWARD_INPUT:
            if here not in self.halves:
                raise Impossible(here)
            self.gradients[worker, stage, chunk, self.halves[here]] += 1


def outcome(program: Program) -> object:
    """What the program computes, as terms that can be compared between programs; None if it cannot finish."""
    machine = Machine(program)
    positions = [0] * program.workers
    moved = True
    while moved:
        moved = False
        for worker, order in enumerate(program.orders):
            while positions[worker] < len(order):
                try:
                    machine.step(worker, order[positions[worker]])
                except Blocked:
                    break
                except Impossible:
                    return None
                positions[worker] += 1
                moved = True
    if any(position < len(order) for position, order in zip(positions, program.orders)):
        return None
    return Outcome(machine).value


class Outcome:
    """The machine's counts, with each term replaced by a digest of all that it is built from."""

    def __init__(self, machine: Machine) -> None:
        self.parts = dict(enumerate(machine.terms))
        self.hashes: dict[int, int] = {}
        self.value = [self.count(machine.outputs), self.count(machine.gradients), sums(self, machine)]

    def count(self, counter: Counter[Any]) -> frozenset[Any]:
        return frozenset(((*key[:-1], self.digest(key[-1])), count) for key, count in counter.items())

    def digest(self, term: int) -> int:
        """The identity of terms, without their numbers, which depend on the order of execution."""
        if term not in self.hashes:
            name, *rest = self.parts[term]
            fixed, inner = (rest[:2], rest[2:]) if name in ("F", "B") else ([], rest)
            self.hashes[term] = hash((name, *fixed, *(self.digest(part) for part in inner)))
        return self.hashes[term]


def sums(outcome: Outcome, machine: Machine) -> frozenset[Any]:
    return frozenset(
        ((parameter, worker, frozenset(((*key[:-1], outcome.digest(key[-1])), n) for key, n in parts)), count)
        for (parameter, worker, parts), count in machine.sums.items()
    )
