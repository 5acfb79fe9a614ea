"""Schedules as grids, in pages, and as drawings; how long they take, and what they hold."""

import json
import random
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import Span, Timeline, add_communication, make_schedule, render_svg, render_trace, simulate
from pippy.drivers.plan.cost.held_bytes import Held, ModelInput, PipeBytes, StageBytes, held_bytes, lowered_program
from pippy.drivers.plan.drawings import render_text
from pippy.drivers.plan.language.edges import Edge, Pass, Replicated
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.drivers.plan.language.instructions import Add, Compute, Free, Op, Receive
from pippy.drivers.plan.orders.registry import REGISTRY
from tests.drivers.plan.graphs import build, with_random_graph

GRIDS = Path(__file__).parent / "grids"
ONE = Fraction(1)
STAGES = {"interleaved_1f1b": 2, "looped_bfs": 2}


@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "list"])
def test_the_grid_of_4_workers_and_8_micro_batches(name):
    program = make_schedule(name, workers=4, chunks=8, stages_per_worker=STAGES.get(name))
    assert render_text(program) + "\n" == (GRIDS / f"{name}.txt").read_text()


def test_makespans_of_dualpipe_v_in_units_of_one_devices_forward():
    """Those of the others follow from how long they idle, below."""
    assert [simulate(make_schedule("dualpipe_v", workers=p, chunks=2 * p)).makespan for p in (4, 8)] == [25.5, 51.5]


COSTS = [
    tuple(map(Fraction, costs))
    for costs in (("1", "1", "1"), ("2", "1", "1"), ("1", "2", "1"), ("2", "2", "1"), ("1/3", "1/2", "1/4"))
]
SIZES = [(1, 1), (1, 5), (2, 2), (2, 9), (3, 7), (4, 8), (5, 5), (5, 23), (8, 16)]


def idle(name, workers, chunks, costs, stages_per_worker=None):
    program = make_schedule(name, workers=workers, chunks=chunks, stages_per_worker=stages_per_worker)
    return set(simulate(program, *map(Fraction, costs)).idle)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("costs", COSTS)
def test_idle_of_fill_drain_and_1f1b(p, m, costs):
    forward, *backward = costs
    assert idle("fill_drain", p, m, costs) == {(p - 1) * (forward + sum(backward))}
    assert idle("1f1b", p, m, costs) == {(p - 1) * (forward + sum(backward))}
    assert idle("eager_1f1b", p, m, costs) == {(p - 1) * (forward + sum(backward))}


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_idle_of_looped_schedules_for_any_number_of_chunks_from_p_on(p, m, v):
    for costs in COSTS:
        assert idle("interleaved_1f1b", p, m, costs, v) == {(p - 1) * sum(costs) / v}
        assert idle("looped_bfs", p, m, costs, v) == {(p - 1) * sum(costs) / v}


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("costs", COSTS)
def test_idle_of_zb_h1(p, m, costs):
    forward, backward_input, backward_weight = costs
    assert idle("zb_h1", p, m, costs) == {(p - 1) * (forward + backward_input - backward_weight)}


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (3, 7), (4, 8), (5, 23), (8, 16)])
def test_zb_h2_and_zb_v_idle_in_the_fill_and_drain_only(p, m):
    for name, distance in (("zb_h2", ONE), ("zb_v", ONE / 2)):
        result = simulate(make_schedule(name, workers=p, chunks=m), ONE, ONE, ONE)
        assert [parts.fill for parts in result.idle_parts] == [worker * distance for worker in range(p)]
        assert [parts.drain for parts in result.idle_parts] == [(p - 1 - worker) * distance for worker in range(p)]
        assert not any(parts.waiting for parts in result.idle_parts)


@pytest.mark.parametrize("p", range(1, 10))
def test_idle_of_v_half_and_v_min_for_any_number_of_chunks_from_p_on(p):
    to_next_third = (1 - p) % 3
    for m in (p, 2 * p + 1):
        assert idle("v_half", p, m, (1, 1, 1)) == {max(p - 1, 3 * p - 7 - p % 2) * ONE / 2}
        assert idle("v_min", p, m, (1, 1, 1)) == {max(p - 1, 4 * p - 5 - 2 * to_next_third) * ONE / 2}


@given(st.integers(1, 10), st.integers(1, 20))
@settings(max_examples=15)
def test_what_v_half_and_v_min_take_and_hold_at_most(p, m):
    """Also with few chunks, where no order is faster than a micro-batch on its way: 4p passes and the last W."""
    for name, bubble, most in (
        ("v_half", 3 * p - 5, 2 * min(p, (p + 1) // 2 + 1)),
        ("v_min", 4 * p - 5, 2 * ((p + 4) // 3)),
    ):
        result = simulate(make_schedule(name, workers=p, chunks=m))
        assert 2 * result.makespan <= max(6 * m + bubble + 2, 4 * p + 4 * m)
        assert max(result.peak_live) <= min(2 * m, most)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 6), (4, 8), (5, 23)])
def test_eager_1f1b_hides_slow_links_that_1f1b_waits_for(p, m):
    """Up to a link that takes half as long as F and B: forth and back, it takes no longer than a worker works meanwhile."""
    for latency in (ONE / 10, ONE / 2, ONE, ONE * 3 / 2):
        eager, usual = (
            simulate(make_schedule(name, workers=p, chunks=m), ONE, ONE, ONE, latency=latency).makespan
            for name in ("eager_1f1b", "1f1b")
        )
        assert eager == 3 * (m + p - 1) + 2 * (p - 1) * latency
        assert usual >= eager + (m - p) * latency * (p > 1)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (3, 7), (4, 8), (5, 23), (8, 16)])
def test_peaks(p, m):
    def peaks(name):
        return make_schedule(name, workers=p, chunks=m).peak_live

    assert peaks("fill_drain") == (m,) * p
    assert peaks("1f1b") == tuple(p - worker for worker in range(p))
    assert peaks("eager_1f1b") == tuple(min(m, 2 * (p - worker) - 1) for worker in range(p))
    assert peaks("zb_h1") == (p,) * p
    assert peaks("zb_h2") == (min(m, 2 * p - 1),) * p
    assert peaks("zb_v") == (2 * p,) * p  # of stages that are half as large
    assert peaks("v_half") == (2 * min(m, p, (p + 1) // 2 + 1),) * p
    assert peaks("v_min") == (min(2 * m, 2 * ((p + 4) // 3)),) * p
    assert peaks("dualpipe_v") == (min(2 * m, 2 * p + 1),) * p
    assert peaks("forward_only") == (1,) * p


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_zb_h2_is_never_slower_than_zb_h1(p):
    for m in range(1, 2 * p + 2):
        of_h1, of_h2 = (simulate(make_schedule(name, workers=p, chunks=m)).makespan for name in ("zb_h1", "zb_h2"))
        assert of_h2 <= of_h1


# The page on schedules has them all. That its blocks run is tested with all other pages.


PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"


def test_every_schedule_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in REGISTRY if f"| `{name}` |" not in page] == []


# The drawings: exact text, well-formed SVG, trace events that add up; of programs and of recorded runs.


RECORDED = Timeline(
    [
        [Span(Compute(Op.FORWARD, 0, 0), 0.0, 0.1), Span(Compute(Op.FORWARD, 0, 1), 0.1, 0.3)],
        [Span(Compute(Op.FORWARD, 1, 0), 0.2, 0.3)],
    ]
)


def test_a_recorded_run_is_drawn_like_a_simulated_one():
    assert render_text(RECORDED) == "0 | F0 F1 --\n1 | .  .  F0"
    assert render_text(RECORDED, step=0.3) == "0 | F1\n1 | F0"


def test_a_grid_too_wide_to_read_is_refused():
    with pytest.raises(ArgumentError, match=r"a grid of 30000 columns is unreadable; pass a longer step"):
        render_text(RECORDED, step=1e-5)
    with pytest.raises(ArgumentError, match=r"step=0 must be a number above zero"):
        render_text(RECORDED, step=0)


def test_a_zero_cost_pass_is_still_drawn():
    program = make_schedule("1f1b", workers=1, chunks=1)
    assert render_text(simulate(program, forward=0).timeline).count("|") == 1


def test_an_empty_timeline_is_drawn_as_nothing():
    assert render_text(Timeline([[], []])) == "0 | .\n1 | ."
    assert 'class="box"' not in render_svg(Timeline([[]]))


def test_the_svg_has_one_box_for_each_pass():
    program = make_schedule("zb_v", workers=3, chunks=4)
    root = ElementTree.fromstring(render_svg(program))
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3 * 6 * 4
    assert titles[0] == "F0.0: 0 to 0.5"


def test_the_boxes_of_a_worker_do_not_overlap():
    root = ElementTree.fromstring(render_svg(make_schedule("1f1b", workers=2, chunks=5)))
    rects = root.iterfind(".//*[@class='boxes']/*/{*}rect")
    boxes = [(box.get("y"), *(float(box.get(each) or 0) for each in ("x", "width"))) for box in rects]
    assert len(boxes) == 20
    for (row, left, width), (next_row, next_left, _) in pairwise(boxes):
        assert row != next_row or next_left >= left + width - 0.02


def test_the_trace_adds_up():
    result = simulate(make_schedule("interleaved_1f1b", workers=2, chunks=3, stages_per_worker=2))
    events = json.loads(render_trace(result.timeline, unit=10.0))["traceEvents"]
    passes = [event for event in events if event["ph"] == "X"]
    assert len(passes) == 2 * 2 * 2 * 3
    assert max(event["ts"] + event["dur"] for event in passes) == float(result.makespan) * 10
    for worker, idle in enumerate(result.idle):
        busy = sum(event["dur"] for event in passes if event["tid"] == worker)
        assert busy == float(result.makespan - idle) * 10


@pytest.mark.parametrize("spans", [[(0.0, 2.0), (1.0, 3.0)], [(1.0, 0.5)], [(-1.0, 1.0)]])
def test_a_timeline_that_cannot_be_is_refused(spans):
    with pytest.raises(ArgumentError, match=r"worker 0 runs F0\.0 from .* in order of time"):
        Timeline([[Span(Compute(Op.FORWARD, 0, 0), *span) for span in spans]])


# What is held is counted a second time here: with a set of all that the table of values and the runs of stages have.


def size_of(program, sizes, thing):
    names = program.summands[thing[1]] if thing[0] == "sum" else [thing[-2]]
    return max(sizes.values[name] for name in names)


def held_after(program, sizes, worker):
    """The bytes that are held after each instruction: those of all different things that something has."""
    table, runs, deferred, graded = set(), {}, set(), set()
    found = []
    for each in program.orders[worker]:
        match each:
            case Receive(value, m, _):
                table.add((value, m))
            case Free(value, m):
                table -= {(value, m), ("sum", value, m)}
            case Add(value, m, into):
                table -= {(value, m), (into, m)}
                table.add(("sum", into, m))
            case Compute(op, stage, m):
                takes = {(edge.value, m) for edge in program.flow if Pass("F", stage) in edge.targets}
                gives = {(edge.value, m) for edge in program.flow if edge.source == Pass("F", stage)}
                own = {each for each in gives if each[0] in sizes.stages[stage].kept_outputs}
                needed = {each for each in takes if each[0] not in sizes.stages[stage].freed_inputs}
                if op == "F":
                    table |= gives
                if stage in program.backward:
                    again = (stage, m) in program.checkpointed
                    own = {("again", *each) for each in own} if again else own
                    if op == "F" and again:
                        runs[stage, m] = takes | {("before", stage, m)}
                    elif op in "FR":
                        runs[stage, m] = needed | own | {("graph", stage, m)}
                    elif op == "W":
                        deferred.remove((stage, m))
                    else:
                        del runs[stage, m]
                        table |= {(edge.value, m) for edge in program.flow if edge.source == Pass("B", stage)}
                        if op == "I":
                            deferred.add((stage, m))
                        graded.add((stage, "early"))
                    if op in "BW":
                        graded.add((stage, "late"))
        things = table.union(*runs.values())
        held = sum(size_of(program, sizes, thing) for thing in things if thing[0] not in ("before", "graph"))
        for what, name in (("before", "repeating"), ("graph", "kept")):
            held += sum(getattr(sizes.stages[thing[1]], name) for thing in things if thing[0] == what)
        held += sum(sizes.stages[stage].deferred for stage, _ in deferred)
        for stage, when in graded:
            early = sizes.stages[stage].early_gradients
            held += early if when == "early" else sizes.stages[stage].gradients - early
        found.append(held)
    return found


@pytest.mark.parametrize("name", [name for name, entry in REGISTRY.items() if entry.training])
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_all_that_something_has_is_counted_once(name, checkpoint):
    rng = random.Random(f"{name} {checkpoint}")
    program = make_schedule(name, workers=2, chunks=4, checkpoint=checkpoint)
    lowered = add_communication(with_random_graph(program, rng))
    number = lambda: rng.randrange(1, 100)  # noqa: E731

    def stage_bytes(stage):
        takes = frozenset(edge.value for edge in lowered.flow if Pass("F", stage) in edge.targets if rng.random() < 0.3)
        gives = frozenset(edge.value for edge in lowered.flow if edge.source == Pass("F", stage) if rng.random() < 0.5)
        return StageBytes(0, 99, 0, number(), gives, takes, number(), number(), early_gradients=number())

    stages = tuple(map(stage_bytes, range(lowered.stages)))
    sizes = PipeBytes(stages, {edge.value: number() for edge in lowered.flow})
    for worker, found in enumerate(held_bytes(lowered, sizes)):
        again = held_after(lowered, sizes, worker)
        assert list(found.after) == [*again, again[-1]], worker
        assert found.peak.total == max(found.most) and found.most[found.at] == found.peak.total


def test_a_peak_by_kind():
    """By hand. The peak of worker 1 is while B1.0 runs: the input of micro-batch 0 is there, and all that it keeps."""
    program = make_schedule("1f1b", workers=2, chunks=2)
    first = StageBytes(1000, 1000, 2000, kept=50, forward=70, first_backward=9)
    last = StageBytes(100, 100, kept=40, forward=45, backward=21, first_backward=131, results=1)
    given = ModelInput("x", bytes=3, total=6, stages=(0,))
    sizes = PipeBytes((first, last), {"activation_0": 5, "gradient_0": 7}, inputs=(given,))
    one, other = held_bytes(program, sizes)
    # F0.0 leaves its output and what is kept; F0.1 takes 70 for a while; then B0.0 brings the gradients, which stay
    assert one.peak == Held(parameters=1000, gradients=1000, optimizer=2000, kept=50, inputs=6, values=7)
    assert other.peak == Held(parameters=100, kept=40, inputs=5, working=131)
    assert str(add_communication(program).orders[1][other.at]) == "B1.0"
    assert other.after[-1] == 202  # parameters, gradients, and two results


@pytest.mark.parametrize("stay", [True, False])
def test_inputs_of_the_model_are_there_from_the_start(stay):
    program = make_schedule("fill_drain", workers=1, chunks=4)
    given = ModelInput("x", bytes=3, total=12, stages=(0,))
    (found,) = held_bytes(program, PipeBytes((StageBytes(kept=1),), inputs=(given,), inputs_stay=stay))
    assert found.peak.total == 12 + 4 and found.after[-1] == (12 if stay else 0)


def test_an_output_that_is_a_parameter_counts_where_it_was_sent():
    program = build("F0.0, B0.0 | F1.0, B1.0", (0, 1)).for_graph(
        [Edge("weight", Pass("F", 0), (Pass("F", 1),)), Edge("grad", Pass("B", 1), (Pass("B", 0),))]
    )
    sizes = PipeBytes((StageBytes(parameters=8), StageBytes()), {"weight": 8, "grad": 8}, owned=frozenset(["weight"]))
    one, other = held_bytes(program, sizes)
    assert (one.peak.total, other.peak.total) == (16, 8)


def test_gradients_of_copies_are_added_up_at_the_end():
    """The first worker holds another's gradients while it adds them to its own. Others take the sum for what they have sent."""
    for workers in (2, 3):
        program = make_schedule("1f1b", workers=workers, chunks=1)
        program = program.for_graph(program.flow, replicated=[Replicated("emb", tuple(range(workers)))])
        stage = StageBytes(parameters=10, gradients=10)
        one, *others = held_bytes(program, PipeBytes((stage,) * workers, replicated={"emb": 10}))
        assert one.peak == Held(parameters=10, gradients=10, working=10)
        assert str(lowered_program(program).orders[0][one.at]) == "receive gradients of emb from 1"
        assert {each.peak for each in others} == {Held(parameters=10, gradients=10)}
