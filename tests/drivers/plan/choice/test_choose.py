"""The chosen schedule is the best of all that can be made and simulated, one by one, and keeps the limits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import Costs, make_schedule, simulate_with, validate
from pippy.drivers.plan.choice.problem import TIE, LiveLimit, MemoryLimit, Problem
from pippy.drivers.plan.choice.search import choose
from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes, peak_bytes
from pippy.drivers.plan.language.edges import Edge, Pass
from pippy.drivers.plan.language.errors import ArgumentError, ScheduleError
from pippy.drivers.plan.orders.registry import REGISTRY

COST = st.floats(0.001, 0.01)


@st.composite
def problems(draw):
    workers = draw(st.integers(1, 4))
    each = draw(st.integers(1, 2))
    shape = draw(st.sampled_from(["linear", "looped", "v"]))
    chunks = draw(st.integers(1, 6))
    program = make_schedule("1f1b", workers=workers, chunks=chunks, stages_per_worker=each, placement=shape)
    stages = [draw(st.lists(COST, min_size=program.stages, max_size=program.stages)) for _ in range(4)]
    return program, Costs(*stages, latency=draw(st.sampled_from([0, 0.001])))


def by_hand(program, costs, most=None):
    """What each schedule takes, and holds at most, computed one by one."""
    found = {}
    for name, entry in REGISTRY.items():
        options = {"costs": costs, "memory": most} if name == "list" else {}
        try:
            if not entry.training:
                continue
            made = make_schedule(
                name, workers=program.workers, chunks=program.chunks, placement=program.placement, **options
            )
        except ScheduleError:
            continue
        if most is None or max(made.peak_live) <= most:
            found[name] = simulate_with(made, costs).makespan, max(made.peak_live), sum(made.peak_live)
    return found


@settings(deadline=None, max_examples=30)
@given(problems())
def test_the_choice_is_the_best_of_all(problem):
    program, costs = problem
    expected = by_hand(program, costs)
    choice = choose(Problem.of(program, costs))
    assert {each.name: each.seconds for each in choice.candidates} == {name: each[0] for name, each in expected.items()}
    alike = {name: each for name, each in expected.items() if each[0] <= min(expected.values())[0] * (1 + TIE)}
    assert choice.schedule in alike
    assert choice.chosen.memory == min((most, total) for _, most, total in alike.values())
    validate(choice.program)


@settings(deadline=None, max_examples=30)
@given(problems(), st.integers(2, 5))
def test_a_limit_is_kept_and_nothing_that_keeps_it_is_passed_over(problem, most):
    program, costs = problem
    choice = choose(Problem.of(program, costs, [LiveLimit((most,) * program.workers)]))
    assert max(choice.program.peak_live) <= most
    expected = by_hand(program, costs, most)
    assert {each.name for each in choice.candidates} == set(expected)
    assert choice.chosen.seconds <= min(expected.values())[0] * (1 + TIE)
    for name, why in choice.left_out:
        assert name not in expected and why


def test_schedules_that_take_as_long_differ_by_memory():
    program = make_schedule("1f1b", workers=2, chunks=8, stages_per_worker=2, placement="v")
    choice = choose(Problem.of(program, Costs(1.0, 2.0, 2.0)))
    fastest, chosen = choice.candidates[0], choice.chosen
    assert chosen is not fastest
    assert chosen.seconds <= fastest.seconds * (1 + TIE) and chosen.memory < fastest.memory
    assert "would not hold less" in str(choice) and str(choice).count("<- chosen") == 1


def test_bytes_are_limited_where_stages_differ():
    program = make_schedule("1f1b", workers=2, chunks=6, stages_per_worker=2)
    sizes = PipeBytes(tuple(StageBytes(kept=kept, deferred=kept) for kept in (1, 100, 10, 10)))
    choice = choose(Problem.of(program, Costs(), [MemoryLimit((203, 50))], sizes=sizes))
    found = peak_bytes(choice.program, sizes)
    assert choice.chosen.peak_bytes == found and found[0] <= 203 and found[1] <= 50
    assert any("bytes on worker" in why for _, why in choice.left_out)
    with pytest.raises(
        ArgumentError, match=r"no schedule stays within the limits(.|\n)*1f1b: it holds .* bytes on worker 1"
    ):
        choose(Problem.of(program, Costs(), [MemoryLimit((203, 19))], sizes=sizes))


def test_a_limit_of_bytes_is_refused_where_nothing_says_the_bytes():
    with pytest.raises(ArgumentError, match=r"1f1b: a limit of bytes needs the bytes of a micro-batch"):
        choose(Problem.of(make_schedule("1f1b", workers=2, chunks=4), Costs(), [MemoryLimit((9, 9))]))


def test_between_v_min_and_zb_v_the_fastest_that_fits_is_taken():
    program = make_schedule("1f1b", workers=4, chunks=5, stages_per_worker=2, placement="v")
    sizes = PipeBytes((StageBytes(kept=10, deferred=10),) * 8)
    problems = [Problem.of(program, Costs(), [MemoryLimit((most,) * 4)], sizes=sizes) for most in (59, 60, 80)]
    assert [choose(each).schedule for each in problems] == ["v_min", "v_half", "zb_v"]


def test_the_edges_of_the_graph_are_those_of_the_choice():
    edges = [Edge("a", Pass("F", 0), (Pass("F", 1), Pass("F", 2))), Edge("b", Pass("F", 1), (Pass("F", 2),))]
    edges += [Edge("c", Pass("B", 2), (Pass("B", 1),)), Edge("d", Pass("B", 1), (Pass("B", 0),))]
    program = make_schedule("1f1b", workers=3, chunks=4).for_graph(edges, [0, 1, 2])
    slow = Costs(latency={"a": 0.5, "b": 0.0, "c": 0.0, "d": 0.0})
    choice = choose(Problem.of(program, slow))
    assert choice.program.edges == tuple(edges)
    assert choice.chosen.seconds == simulate_with(choice.program, slow).makespan


def test_another_placement_is_named_where_it_would_be_faster():
    program = make_schedule("1f1b", workers=4, chunks=4, stages_per_worker=2)
    choice = choose(Problem.of(program, Costs(0.002, 0.004, 0.0)))
    assert [shape for shape, _ in choice.elsewhere] == ["looped", "v"]
    assert "with placement='v', " in str(choice) and "that takes another driver" in str(choice)
    v_shaped = make_schedule("1f1b", workers=4, chunks=4, stages_per_worker=2, placement="v")
    there = choose(Problem.of(v_shaped, Costs(0.002, 0.004, 0.0)))
    assert all(shape == "looped" for shape, _ in there.elsewhere)
    assert there.chosen.seconds <= choice.elsewhere[1][1].seconds * (1 + TIE)


def test_a_large_program_is_not_searched_and_that_is_said():
    choice = choose(Problem.of(make_schedule("1f1b", workers=8, chunks=100), Costs()))
    assert ("list", "a search over so many computations takes long") in choice.left_out
