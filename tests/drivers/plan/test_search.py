"""The list scheduler is never worse than a named schedule that fits, exact on tiny cases, and keeps to its memory."""

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations, product
from typing import Any

import pytest

from pippy.drivers.plan import Costs, make_schedule, simulate_with
from pippy.drivers.plan.language.errors import ArgumentError, PlacementError, ProgramError
from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.placement import make_placement
from pippy.drivers.plan.language.program import Program, peak_live
from pippy.drivers.plan.orders.registry import REGISTRY


def worker_orders(stages: tuple[int, ...], chunks: int, ops: str, memory: int) -> Iterator[tuple[Compute, ...]]:
    """All orders of a worker's passes in which every pass follows what it builds on, within the memory."""
    passes = [Compute(Op(op), stage, chunk) for stage in stages for chunk in range(chunks) for op in ops]
    for order in permutations(passes):
        at = {compute: place for place, compute in enumerate(order)}
        chains = ([at[Compute(Op(op), stage, chunk)] for op in ops] for stage in stages for chunk in range(chunks))
        if all(chain == sorted(chain) for chain in chains) and peak_live(order, frozenset(stages)) <= memory:
            yield order


def brute_force(shape: Program, ops: str, memory: int, costs: Costs) -> Fraction | float:
    """The shortest makespan of all programs there are."""
    workers = range(shape.workers)
    choices = [list(worker_orders(shape.placement.stages_of(w), shape.chunks, ops, memory)) for w in workers]
    best: Fraction | float = float("inf")
    for orders in product(*choices):
        try:
            best = min(best, simulate_with(shape.with_orders(orders), costs).makespan)
        except ProgramError:
            continue
    return best


TINY = [
    (2, 2, [0, 1], "FIW", 2),
    (2, 2, [0, 1], "FIW", 1),
    (2, 2, [0, 1], "FB", 1),
    (2, 3, [0, 1], "FB", 2),
    (3, 2, [0, 1, 2], "FB", 2),
    (3, 1, [2, 0, 1], "FIW", 2),
    (2, 1, [0, 1, 0], "FIW", 3),
    (2, 1, [0, 1, 1, 0], "FB", 2),
    (1, 2, [0, 0], "FB", 3),
]


def random_costs(rng: random.Random, program: Program) -> Costs:
    def per_stage() -> list[Fraction]:
        return [Fraction(rng.randint(0, 6), 2) for _ in range(program.stages)]

    latency = Fraction(rng.randint(0, 4), 2)
    return Costs(per_stage(), per_stage(), per_stage(), latency=latency, size=Fraction(rng.randint(0, 2), 2))


@pytest.mark.parametrize(("workers", "chunks", "worker_of", "ops", "memory"), TINY)
def test_brute_force_finds_nothing_better(workers, chunks, worker_of, ops, memory):
    rng = random.Random(7)
    for _ in range(1 if (chunks, ops) == (3, "FB") else 3):
        sizes: dict[str, Any] = {"workers": workers, "chunks": chunks, "placement": dict(enumerate(worker_of))}
        shape = make_schedule("fill_drain", **sizes)
        costs = random_costs(rng, shape)
        found = make_schedule("list", **sizes, costs=costs, memory=memory, halves=ops == "FIW")
        unlimited = Program("any", shape.placement, chunks, found.orders, found.backward)
        assert simulate_with(found, costs).makespan == brute_force(unlimited, ops, memory, costs)


@pytest.mark.parametrize("seed", range(12))
def test_no_named_schedule_that_fits_is_better(seed):
    rng = random.Random(seed)
    workers, chunks, shape = rng.randint(1, 5), rng.randint(1, 8), rng.choice(["linear", "looped", "v"])
    placement = make_placement(workers, rng.randint(1, 2) if shape != "linear" else 1, shape)
    memory = [len(placement.stages_of(worker)) * rng.randint(1, chunks) for worker in range(workers)]
    sizes: dict[str, Any] = {"workers": workers, "chunks": chunks, "placement": placement}
    costs = random_costs(rng, make_schedule("fill_drain", **sizes))
    found = make_schedule("list", **sizes, costs=costs, memory=memory)
    assert all(peak <= limit for peak, limit in zip(found.peak_live, memory))
    for name, entry in REGISTRY.items():
        if name == "list" or not entry.training:
            continue
        try:
            named = make_schedule(name, **sizes)
        except PlacementError:
            continue
        if all(peak <= limit for peak, limit in zip(named.peak_live, memory)):
            assert simulate_with(found, costs).makespan <= simulate_with(named, costs).makespan, name


def test_in_less_memory_than_1f1b_needs_it_is_as_fast():
    found = make_schedule("list", workers=4, chunks=8, memory=3)
    assert simulate_with(found, Costs()).makespan == 33
    assert max(found.peak_live) == 3


def test_whole_backwards_only():
    program = make_schedule("list", workers=3, chunks=4, halves=False)
    assert {compute.op for order in program.computations for compute in order} == {"F", "B"}


@pytest.mark.parametrize("memory", [0, 1, -1, 1.5, [2, 1], [2], True])
def test_too_little_memory_is_refused(memory):
    with pytest.raises(ArgumentError, match=r"memory="):
        make_schedule("list", workers=2, chunks=2, stages_per_worker=2, placement="v", memory=memory)
