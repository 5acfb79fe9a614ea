"""What holds for every schedule, that the search finds none that is better, and that a broken one is caught."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from fractions import Fraction
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import Costs, add_communication, make_schedule, parse_program, simulate_with, validate
from pippy.drivers.plan.language.errors import ArgumentError, PlacementError, ProgramError
from pippy.drivers.plan.language.instructions import Compute, Free, Instruction, Op, Payload, Receive, Send
from pippy.drivers.plan.language.placement import make_placement
from pippy.drivers.plan.language.program import Program, peak_live
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.rewrites import Checkpoint
from tests.drivers.plan.graphs import on_random_hosts, outcome, with_random_graph

NAMED = [name for name in REGISTRY if name != "list"]
cost = st.floats(0, 8, allow_nan=False).map(lambda number: round(number * 4) / 4)  # sums of quarters are exact


@st.composite
def placements(draw):
    workers = draw(st.integers(1, 16))
    shape = draw(st.sampled_from(["linear", "looped", "v", "dict"]))
    counts = draw(st.one_of(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=workers, max_size=workers)))
    placement = make_placement(workers, counts, "linear" if shape == "dict" else shape)
    if shape != "dict":
        return placement
    shuffled = draw(st.permutations(placement.worker_of))
    return make_placement(workers, placement=dict(enumerate(shuffled)))


@st.composite
def programs(draw, largest: int = 64):
    """A named schedule on a placement that it is made for, or on any that it accepts."""
    name = draw(st.sampled_from(NAMED))
    chunks = draw(st.integers(1, largest))
    if draw(st.booleans()):
        return make_schedule(name, workers=draw(st.integers(1, 16)), chunks=chunks)
    placement = draw(placements())
    try:
        return make_schedule(name, workers=placement.workers, chunks=chunks, placement=placement)
    except PlacementError:
        assume(False)


@given(programs())
@settings(max_examples=40)
def test_every_program_keeps_to_its_stated_memory(program: Program):
    assert program.memory is not None
    assert all(peak <= limit for peak, limit in zip(program.peak_live, program.memory))


@given(programs())
@settings(max_examples=40)
def test_gradients_are_summed_in_the_order_of_the_micro_batches(program: Program):
    for order in program.computations:
        for stage in {compute.stage for compute in order}:
            for op in Op:
                chunks = [compute.microbatch for compute in order if (compute.op, compute.stage) == (op, stage)]
                assert chunks == sorted(chunks)


@given(programs(largest=24), st.data())
@settings(max_examples=35)
def test_every_program_simulates(program: Program, data):
    per_stage = st.lists(cost, min_size=program.stages, max_size=program.stages)
    costs = Costs(
        data.draw(per_stage), data.draw(per_stage), data.draw(per_stage), latency=data.draw(cost), size=data.draw(cost)
    )
    result = simulate_with(program, costs)
    for worker, spans in enumerate(result.timeline.spans):
        busy = sum(span.duration for span in spans)
        assert [span.compute for span in spans] == list(program.computations[worker])
        assert busy + result.idle[worker] == result.makespan
        assert result.idle[worker] >= 0
        assert worker not in result.idle_parts[worker].waiting


@given(programs(largest=16), st.integers(0, 2**32))
@settings(max_examples=35)
def test_lowered_programs_are_valid_and_run_the_same(program: Program, seed: int):
    rng = random.Random(seed)
    program = on_random_hosts(with_random_graph(program, rng), rng)
    validate(program)
    lowered = add_communication(program)
    validate(lowered)
    assert add_communication(lowered) == lowered
    validate(lowered, buffer=program.chunks * program.stages)
    assert lowered.computations == program.computations
    assert simulate_with(lowered, Costs(latency=0.5)) == simulate_with(program, Costs(latency=0.5))


@given(programs(largest=12), st.integers(0, 2**32), st.booleans())
@settings(max_examples=40)
def test_every_program_goes_through_its_text(program: Program, seed: int, lower: bool):
    rng = random.Random(seed)
    program = on_random_hosts(with_random_graph(program, rng), rng)
    program = add_communication(program) if lower else program
    assert parse_program(str(program)) == program


@given(programs(largest=12), st.integers(0, 2**32))
@settings(max_examples=40)
def test_a_value_goes_once_to_each_host(program: Program, seed: int):
    """Each worker that needs it gets it, and no worker holds it longer than if its maker had sent it."""
    rng = random.Random(seed)
    program = on_random_hosts(with_random_graph(program, rng), rng)
    hosts = program.hosts or (0,) * program.workers
    sizes = {edge.value: rng.randint(1, 9) for edge in program.flow}
    lowered, plain = add_communication(program, sizes=sizes), add_communication(replace(program, hosts=None))
    validate(lowered)
    entered, got = Counter[tuple[str, int, int]](), Counter[tuple[str, int, int]]()
    for worker, order in enumerate(lowered.orders):
        for each in order:
            if isinstance(each, Receive):
                got[each.value, each.microbatch, worker] += 1
                if lowered.are_apart(each.source, worker):
                    entered[each.value, each.microbatch, hosts[worker]] += 1
    assert set(entered.values()) <= {1}
    assert got == Counter(
        (each.value, each.microbatch, worker)
        for worker, order in enumerate(plain.orders)
        for each in order
        if isinstance(each, Receive)
    )
    assert [[each for each in order if isinstance(each, Free)] for order in lowered.orders] == [
        [each for each in order if isinstance(each, Free)] for order in plain.orders
    ]
    one, other = (busiest(each, hosts, sizes) for each in (lowered, plain))
    assert one <= other


def busiest(program: Program, hosts: tuple[int, ...], sizes: dict[str, int]) -> int:
    """The most that a host sends to others."""
    sent = Counter[int]()
    for worker, order in enumerate(program.orders):
        for each in order:
            if isinstance(each, Send) and hosts[worker] != hosts[each.to]:
                sent[hosts[worker]] += sizes[each.value]
    return max(sent.values(), default=0)


@given(st.sampled_from(NAMED), st.integers(1, 8), st.integers(0, 2**32), cost, cost)
@settings(max_examples=25)
def test_the_lines_between_two_workers_are_simulated_as_their_channels(
    name: str, chunks: int, seed: int, size, latency
):
    program = with_random_graph(make_schedule(name, workers=2, chunks=chunks), random.Random(seed))
    costs = Costs(latency=latency, size=size)
    apart = simulate_with(replace(program, hosts=(0, 1)), costs)
    assert apart == simulate_with(program, costs)


@given(placements(), st.integers(1, 6), st.data())
@settings(max_examples=15)
def test_the_list_scheduler_on_any_placement_and_memory(placement, chunks: int, data):
    assume(placement.stages * chunks <= 60)
    stages = [len(placement.stages_of(worker)) for worker in range(placement.workers)]
    memory = [data.draw(st.integers(count, count * chunks)) for count in stages]
    sizes = {"workers": placement.workers, "chunks": chunks, "placement": placement}
    program = make_schedule("list", **sizes, memory=memory, costs=Costs(latency=data.draw(cost)))
    assert all(peak <= limit for peak, limit in zip(program.peak_live, memory))


@pytest.mark.parametrize("name", ["fill_drain", "looped_bfs", "forward_only", "1f1b", "eager_1f1b", "interleaved_1f1b"])
@given(placement=placements(), chunks=st.integers(1, 6))
@settings(max_examples=15)
def test_schedules_for_any_placement_refuse_none(name, placement, chunks):
    make_schedule(name, workers=placement.workers, chunks=chunks, placement=placement)


@pytest.mark.parametrize("name", NAMED)
def test_a_sample_of_large_sizes(name):
    """Evenly spread over all sizes, where the examples above are mostly small."""
    rng = random.Random(name)
    fixed = name.startswith("zb") or REGISTRY[name].placement == "v"
    for _ in range(6):
        workers, chunks, stages = rng.randint(1, 16), rng.randint(1, 64), rng.randint(1, 4)
        program = make_schedule(name, workers=workers, chunks=chunks, stages_per_worker=None if fixed else stages)
        assert program.memory is not None
        assert all(peak <= limit for peak, limit in zip(program.peak_live, program.memory))


# A program that is changed at any one place is refused, or proven to compute the same: validate has no holes.


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
    """Another operation, place, value, worker, sum or payload in an instruction."""
    order, index = pick(rng, orders)
    chunk, stage, worker = (rng.randrange(n + 1) for n in (program.chunks, program.stages, program.workers))
    value = rng.choice([*(edge.value for edge in program.flow), "unknown"])
    others = {"stage": stage, "microbatch": chunk, "value": value, "into": value, "to": worker, "source": worker}
    others |= {"of": rng.choice([*(each.name for each in program.sums), "unknown"])}
    others |= {"op": rng.choice(list(Op)), "payload": rng.choice(list(Payload))}
    old: Any = order[index]
    field = rng.choice([each.name for each in fields(old)])
    order[index] = replace(old, **{field: others[field]})


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


# The list scheduler is never worse than a named schedule that fits, exact on tiny cases, and keeps to its memory.


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
