"""Programs and graphs that tests of plans are made of."""

import random
from dataclasses import replace

from pippy.drivers.plan.language.edges import Checkpoints, Edge, Pass, Replicated, scan_edge
from pippy.drivers.plan.language.instructions import Instruction, parse_instruction
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


def build(
    orders: str,
    placement: tuple[int, ...],
    chunks: int = 1,
    backward: tuple[int, ...] | None = None,
    memory: tuple[int, ...] | None = None,
    edges: tuple[Edge, ...] | None = None,
    replicated: tuple[Replicated, ...] = (),
    checkpoints: tuple[Checkpoints, ...] = (),
    hosts: tuple[int, ...] | None = None,
) -> Program:
    """A program; it is lowered if anything in it is no computation."""
    lowered = any(word in orders for word in ("send", "receive", "free", "reduce"))
    if backward is None:
        backward = tuple(range(len(placement)))
    known = memory, edges, replicated, lowered, checkpoints
    return Program("test", Placement(placement), chunks, instructions(orders), backward, *known, hosts=hosts)


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
