"""What the search finds is the best of all that could be written down, one by one; and a search that is wrong is caught."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import Costs, add_recompute, make_schedule, simulate_with, validate
from pippy.drivers.plan.choice import recomputed_stages
from pippy.drivers.plan.choice.choose import TIE, lightest_of_fastest
from pippy.drivers.plan.choice.recomputed_stages import fitting_modes, least_modes, tried_modes
from pippy.drivers.plan.choice.search import MicroBatch, Problem, search
from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes, peak_bytes
from pippy.drivers.plan.language.errors import ScheduleError
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.recompute import MODES

COST, KEPT = st.integers(1, 9), st.integers(0, 12)


@st.composite
def problems(draw):
    workers, each = draw(st.sampled_from([(1, 2), (2, 1), (3, 1)]))
    program = make_schedule("1f1b", workers=workers, chunks=1, stages_per_worker=each, placement="v")
    rows, stages = 8, program.stages
    costs = [draw(st.lists(COST, min_size=stages, max_size=stages)) for _ in range(3)]
    kept = draw(st.lists(KEPT, min_size=stages, max_size=stages))
    between = draw(st.integers(0, 3))

    def micro_batch(chunks):
        here = rows // chunks
        sizes = tuple(StageBytes(parameters=5, gradients=5, kept=each * here, forward=each) for each in kept)
        values = {edge.value: between * here for edge in program.flow}
        return MicroBatch(Costs(*[[each * here + 1 for each in stage] for stage in costs]), PipeBytes(sizes, values))

    limits = tuple(draw(st.integers(20, 150)) for _ in range(workers))
    return Problem(program, limits, micro_batch, draw(st.sampled_from([(2,), (4,), (1, 2)])))


def by_hand(problem):
    """The time and the peaks of each schedule with each number of micro-batches and each mode of each stage."""
    given = problem.program
    for chunks, (name, entry) in product(problem.chunks, REGISTRY.items()):
        if entry.training and name != "list":
            for modes in product(MODES, repeat=given.stages):
                try:
                    made = make_schedule(name, workers=given.workers, chunks=chunks, placement=given.placement)
                except ScheduleError:
                    break
                figures, program = problem.micro_batch(chunks), add_recompute(made, dict(enumerate(modes)))
                yield simulate_with(program, figures.costs).makespan, peak_bytes(program, figures.sizes), name, chunks


def fits(held, limits):
    return all(peak <= limit for peak, limit in zip(held, limits))


@settings(deadline=None, max_examples=3)
@given(problems())
def test_the_fastest_that_fits_is_found(problem):
    every = list(by_hand(problem))
    found = search(problem, thorough=False)
    fitting = [each for each in every if fits(each[1], problem.limits)]
    best = {}
    for seconds, _, name, chunks in fitting:
        best[name, chunks] = min(seconds, best.get((name, chunks), seconds))
    assert {(way.name, way.chunks): way.seconds for way in found.ways} == best
    if found.ways:
        chosen = lightest_of_fastest(found.ways)
        assert chosen.seconds <= min(best.values()) * (1 + TIE) and fits(chosen.peak_bytes, problem.limits)
        assert chosen.peak_bytes == peak_bytes(chosen.program, problem.micro_batch(chosen.chunks).sizes)
        validate(chosen.program)
        assert found.nearest is None
        assert found.unlimited.seconds <= chosen.seconds
    else:
        lack = [max(peak / limit for peak, limit in zip(held, problem.limits)) for _, held, *_ in every]
        held = found.nearest.peak_bytes
        assert max(peak / limit for peak, limit in zip(held, problem.limits)) == min(lack)
        again = search(replace(problem, limits=tuple(map(max, held, problem.limits))), thorough=False)
        assert again.ways


def three_stages(limits, checkpoint=None, live=None):
    """A problem in which the first stage has too little room for four micro-batches."""
    sizes = PipeBytes(tuple(StageBytes(kept=10) for _ in range(3)), {f"activation_{stage}": 1 for stage in range(2)})
    program = make_schedule("1f1b", workers=3, chunks=4)
    return Problem(program, limits, lambda chunks: MicroBatch(Costs(), sizes), (4,), checkpoint, live)


def test_only_what_breaks_a_limit_is_computed_again():
    found = search(three_stages((15, 1000, 1000)), thorough=False)
    assert {way.name for way in found.ways} >= {"1f1b", "fill_drain", "zb_h1"}
    assert all(way.modes == {0: way.modes[0], 1: "never", 2: "never"} != {0: "never"} for way in found.ways)
    assert all(way.modes[0] == "never" for way in search(three_stages((1000,) * 3), thorough=False).ways)


def test_a_mode_that_is_given_stays():
    found = search(three_stages((1000,) * 3, checkpoint={1: "always"}), thorough=False)
    assert found.ways and all(way.modes == {0: "never", 1: "always", 2: "never"} for way in found.ways)
    assert not search(three_stages((15, 1000, 1000), checkpoint={1: "always"}), thorough=False).ways


def test_a_limit_of_micro_batches_is_kept_too():
    found = search(three_stages((1000,) * 3, live=(1, 2, 3)), thorough=False)
    assert found.ways and all(fits(way.program.peak_live, (1, 2, 3)) for way in found.ways)
    assert all(way.modes[0] != "never" for way in found.ways)


def test_an_order_is_searched_where_time_allows():
    problem = three_stages((42, 42, 42))
    assert "list" in {way.name for way in search(problem).ways}
    assert "list" not in {way.name for way in search(problem, thorough=False).ways}


def test_many_stages_on_a_worker_are_tried_one_more_at_a_time():
    program = make_schedule("1f1b", workers=2, chunks=4, stages_per_worker=5)
    sizes = PipeBytes(tuple(StageBytes(kept=10) for _ in range(10)))
    tried = tried_modes(program, sizes, None)
    assert [len(tries) for tries in tried] == [11, 11]
    assert [peak for _, peak in tried[0]] == [100, 90, 80, 70, 60, 60, 50, 40, 30, 20, 10]
    (modes,) = fitting_modes(program, tried, (65, 65), Costs())
    assert [modes[stage] for stage in range(6)] == ["except_last"] * 4 + ["never"] * 2
    assert fits(peak_bytes(add_recompute(program, modes), sizes), (65, 65))


@pytest.mark.parametrize("wrong", ["only the first", "the most", "no limit"])
def test_a_wrong_choice_of_stages_is_caught(monkeypatch, wrong):
    """Mutants: one that takes any modes that fit, one that computes all again, and one that forgets the limits."""
    mutants = {
        "only the first": lambda fitting: fitting[-1:],
        "the most": lambda fitting: [dict.fromkeys(fitting[0], "always")] if fitting else [],
        "no limit": lambda fitting: least_modes(fitting) or [{0: "never"}],
    }
    monkeypatch.setattr(recomputed_stages, "least_modes", mutants[wrong])
    with pytest.raises((AssertionError, ValueError, KeyError)):
        test_only_what_breaks_a_limit_is_computed_again()
        test_a_mode_that_is_given_stays()
        test_many_stages_on_a_worker_are_tried_one_more_at_a_time()
