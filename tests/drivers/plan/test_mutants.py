"""A program that is changed at any one place is refused, or proven to compute the same: validate has no holes.

Each mutant drops, repeats, moves, swaps or re-addresses instructions of a random program. Those that validate lets
pass are executed on symbols, and must compute what the original computes in no more memory than is stated.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from pippy.drivers.plan import add_communication, make_schedule, validate
from pippy.drivers.plan.language.errors import ProgramError
from pippy.drivers.plan.language.instructions import (
    Add,
    Compute,
    Free,
    Instruction,
    Op,
    Receive,
    ReceiveNotes,
    Reduce,
    Send,
    SendNotes,
)
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.rewrites import Checkpoint
from tests.drivers.plan.graphs import on_random_hosts, with_random_graph
from tests.drivers.plan.symbolic import outcome

CHECKPOINTS: list[Checkpoint] = ["never", "always", "except_last", {0: "always"}]
PROGRAMS, MUTANTS_EACH = 130, 60
Orders = list[list[Instruction]]


def random_program(rng: random.Random) -> Program:
    name = rng.choice(list(REGISTRY))
    workers = rng.randint(1, 4)
    stages = None if REGISTRY[name].stages_per_worker > 1 or name.startswith("zb") else rng.randint(1, 2)
    checkpoint: Checkpoint = rng.choice(CHECKPOINTS)
    chunks = rng.randint(1, 4)
    replicas = rng.randint(1, min(chunks, 2))
    program = make_schedule(
        name, workers=workers, chunks=chunks, stages_per_worker=stages, checkpoint=checkpoint, replicas=replicas
    )
    if rng.random() < 0.7:
        program = with_random_graph(program, rng)
    if replicas > 1:
        program = replace(program, notes=tuple(stage for stage in range(program.stages) if rng.random() < 0.5))
    if rng.random() < 0.5:
        return program
    program = on_random_hosts(program, rng)
    lowered = add_communication(program)
    assert outcome(lowered) == outcome(add_communication(replace(program, hosts=None)))
    if rng.random() < 0.3:  # frees may be left out altogether
        lowered = lowered.with_orders([i for i in order if not isinstance(i, Free)] for order in lowered.orders)
    return lowered


def pick(rng: random.Random, orders: Orders) -> tuple[list[Instruction], int]:
    order = rng.choice([order for order in orders if order])
    return order, rng.randrange(len(order))


def drop(rng: random.Random, orders: Orders, program: Program) -> None:
    order, index = pick(rng, orders)
    del order[index]


def repeat(rng: random.Random, orders: Orders, program: Program) -> None:
    order, index = pick(rng, orders)
    target = rng.choice([order, rng.choice(orders)])
    target.insert(rng.randint(0, len(target)), order[index])


def move(rng: random.Random, orders: Orders, program: Program) -> None:
    order, index = pick(rng, orders)
    target = rng.choice([order, rng.choice(orders)])
    instruction = order.pop(index)
    target.insert(rng.randint(0, len(target)), instruction)


def swap_neighbours(rng: random.Random, orders: Orders, program: Program) -> None:
    order, index = pick(rng, orders)
    order[index - 1], order[index] = order[index], order[index - 1]


def swap(rng: random.Random, orders: Orders, program: Program) -> None:
    order, index = pick(rng, orders)
    other, place = pick(rng, orders)
    order[index], other[place] = other[place], order[index]


def readdress(rng: random.Random, orders: Orders, program: Program) -> None:
    order, index = pick(rng, orders)
    chunk, stage, worker = (rng.randrange(n + 1) for n in (program.chunks, program.stages, program.workers))
    value = rng.choice([*(edge.value for edge in program.flow), "unknown"])
    match order[index]:
        case Compute() as old:
            changes: list[Instruction] = [
                replace(old, op=rng.choice(list(Op))),
                replace(old, stage=stage),
                replace(old, microbatch=chunk),
            ]
        case Send() as send:
            changes = [replace(send, value=value), replace(send, microbatch=chunk), replace(send, to=worker)]
        case Receive() as receive:
            changes = [
                replace(receive, value=value),
                replace(receive, microbatch=chunk),
                replace(receive, source=worker),
            ]
        case Free() as free:
            changes = [replace(free, value=value), replace(free, microbatch=chunk)]
        case Add() as add:
            changes = [replace(add, value=value), replace(add, microbatch=chunk), replace(add, into=value)]
        case SendNotes():
            changes = [SendNotes(worker), ReceiveNotes(worker)]
        case ReceiveNotes():
            changes = [ReceiveNotes(worker), SendNotes(worker)]
        case old:
            assert old.kind.adds_up
            names = [each.name for each in program.sums]
            given: dict[str, Any] = {each.name: getattr(old, each.name) for each in fields(old)}  # type: ignore[arg-type]
            moved = {**given, **{name: worker for name in given if name != "sum"}}
            changes = [Reduce(rng.choice(names)), type(old)(**moved)]
            changes += [type(old)(**{**given, "sum": rng.choice([*names, "unknown"])})]
    order[index] = rng.choice(changes)


MUTATIONS: list[Callable[[random.Random, Orders, Program], None]] = [
    drop,
    repeat,
    move,
    swap_neighbours,
    swap,
    readdress,
]


def refused(program: Program) -> bool:
    try:
        validate(program)
    except ProgramError:
        return True
    return False


def test_every_mutant_is_refused_or_equivalent():
    rng = random.Random(20)
    counts: Counter[str] = Counter()
    for _ in range(PROGRAMS):
        program = random_program(rng)
        validate(program)
        expected = outcome(program)
        assert expected is not None
        for number in range(MUTANTS_EACH):
            orders = [list(order) for order in program.orders]
            mutation = MUTATIONS[number % len(MUTATIONS)]
            mutation(rng, orders, program)
            mutant = program.with_orders(orders)
            if mutant == program:
                counts["unchanged"] += 1
            elif refused(mutant):
                counts["refused"] += 1
            else:
                assert outcome(mutant) == expected, f"{mutation.__name__} of\n{program}\ngave\n{mutant}"
                assert mutant.memory is None or all(a <= b for a, b in zip(mutant.peak_live, mutant.memory))
                counts["equivalent"] += 1
    print(f"mutants: {counts['refused']} refused, {counts['equivalent']} proven equivalent")
    assert counts["refused"] + counts["equivalent"] >= 5000
    assert counts["refused"] >= 4000  # or the mutations are too tame
    assert counts["equivalent"] >= 100  # or the rules are too strict: instructions that do not meet may change places
