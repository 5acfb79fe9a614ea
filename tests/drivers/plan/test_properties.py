"""What holds for every schedule on random sizes, placements, stage graphs and costs."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import Costs, add_communication, make_schedule, parse_program, simulate_with, validate
from pippy.drivers.plan.language.errors import PlacementError
from pippy.drivers.plan.language.instructions import Free, Op, Receive, Send
from pippy.drivers.plan.language.placement import make_placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.orders.registry import REGISTRY
from tests.drivers.plan.graphs import on_random_hosts, with_random_graph

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
