"""What the search finds is the best of all that could be written down, one by one; and a search that is wrong is caught."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import Costs, add_recompute, make_schedule, simulate_with, validate
from pippy.drivers.plan.choice.problem import TIE, LiveLimit, MemoryLimit, MicroBatch, Problem
from pippy.drivers.plan.choice.search import TriedModes, least_modes, search
from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes, peak_bytes
from pippy.drivers.plan.language.errors import ScheduleError
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.rewrites import MODES

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

    limits = [MemoryLimit(tuple(draw(st.integers(20, 150)) for _ in range(workers)))]
    if draw(st.booleans()):
        limits.insert(0, LiveLimit(tuple(draw(st.integers(1, 6)) for _ in range(workers))))
    return Problem(program, micro_batch, draw(st.sampled_from([(2,), (4,), (1, 2)])), tuple(limits))


def by_hand(problem):
    """Each schedule with each number of micro-batches and each mode of each stage: its time, and its peaks for each limit."""
    given = problem.program
    for chunks, (name, entry) in product(problem.chunks, REGISTRY.items()):
        if entry.training and name != "list":
            for modes in product(MODES, repeat=given.stages):
                try:
                    made = make_schedule(name, workers=given.workers, chunks=chunks, placement=given.placement)
                except ScheduleError:
                    break
                figures, program = problem.micro_batch(chunks), add_recompute(made, dict(enumerate(modes)))
                peaks = peak_bytes(program, figures.sizes)
                held = [peaks if isinstance(limit, MemoryLimit) else program.peak_live for limit in problem.limits]
                yield simulate_with(program, figures.costs).makespan, held, name, chunks


def fits(held, limits):
    return all(peak <= limit for peak, limit in zip(held, limits))


def keeps(held, problem):
    return all(fits(each, limit.most) for each, limit in zip(held, problem.limits))


def lack(held, problem):
    """By how much each limit is broken, the first one first; 1 if it is kept."""
    return tuple(
        max(1, *(peak / most for peak, most in zip(each, limit.most))) for each, limit in zip(held, problem.limits)
    )


@settings(deadline=None, max_examples=10)
@given(problems())
def test_the_fastest_that_fits_is_found(problem):
    every = list(by_hand(problem))
    choice = search(problem, thorough=False)
    best = {}
    for seconds, held, name, chunks in every:
        if keeps(held, problem):
            best[name, chunks] = min(seconds, best.get((name, chunks), seconds))
    assert {(each.name, each.chunks): each.seconds for each in choice.candidates} == best
    for name, why in choice.left_out:
        assert why and not any(name == fitting for fitting, _ in best)
    if choice.candidates:
        chosen = choice.chosen
        alike = [each for each in choice.candidates if each.seconds <= min(best.values()) * (1 + TIE)]
        assert chosen.memory == min(each.memory for each in alike) and chosen in alike
        assert problem.refusal(chosen) == "" and all(fits(limit.held(chosen), limit.most) for limit in problem.limits)
        assert chosen.peak_bytes == peak_bytes(chosen.program, problem.micro_batch(chosen.chunks).sizes)
        validate(chosen.program)
        assert choice.nearest is None
        assert choice.unlimited.seconds <= chosen.seconds
    else:
        nearest = [limit.held(choice.nearest) for limit in problem.limits]
        assert (
            lack(nearest, problem) == problem.lack(choice.nearest) == min(lack(held, problem) for _, held, *_ in every)
        )
        assert problem.refusal(choice.nearest)
        enough = [
            replace(limit, most=tuple(map(max, held, limit.most))) for limit, held in zip(problem.limits, nearest)
        ]
        assert search(replace(problem, limits=tuple(enough)), thorough=False).candidates


@settings(deadline=None, max_examples=30)
@given(problems(), st.data())
def test_a_tighter_limit_never_gives_a_faster_choice(problem, data):
    """The fastest candidate is never faster, so the chosen one is by no more than what counts as equally fast."""
    loose = search(problem, thorough=False)
    number = data.draw(st.integers(0, len(problem.limits) - 1))
    tighter = [
        replace(limit, most=tuple(data.draw(st.integers(1, most)) for most in limit.most)) if at == number else limit
        for at, limit in enumerate(problem.limits)
    ]
    tight = search(replace(problem, limits=tuple(tighter)), thorough=False)
    assert tight.unlimited.seconds == loose.unlimited.seconds
    assert {(each.name, each.chunks) for each in tight.candidates} <= {
        (each.name, each.chunks) for each in loose.candidates
    }
    if tight.candidates:
        assert tight.candidates[0].seconds >= loose.candidates[0].seconds >= loose.unlimited.seconds
        assert tight.chosen.seconds * (1 + TIE) >= loose.chosen.seconds


def three_stages(limits, checkpoint=None, live=None):
    """A problem in which the first stage has too little room for four micro-batches."""
    sizes = PipeBytes(tuple(StageBytes(kept=10) for _ in range(3)), {f"activation_{stage}": 1 for stage in range(2)})
    program = make_schedule("1f1b", workers=3, chunks=4)
    given = (*([] if live is None else [LiveLimit(live)]), MemoryLimit(limits))
    return Problem(program, lambda chunks: MicroBatch(Costs(), sizes), (4,), given, checkpoint)


def test_only_what_breaks_a_limit_is_computed_again():
    choice = search(three_stages((15, 1000, 1000)), thorough=False)
    assert {each.name for each in choice.candidates} >= {"1f1b", "fill_drain", "zb_h1"}
    assert all(each.modes == {0: each.modes[0], 1: "never", 2: "never"} != {0: "never"} for each in choice.candidates)
    assert all(each.modes[0] == "never" for each in search(three_stages((1000,) * 3), thorough=False).candidates)


def test_a_mode_that_is_given_stays():
    choice = search(three_stages((1000,) * 3, checkpoint={1: "always"}), thorough=False)
    assert choice.candidates and all(each.modes == {0: "never", 1: "always", 2: "never"} for each in choice.candidates)
    assert not search(three_stages((15, 1000, 1000), checkpoint={1: "always"}), thorough=False).candidates


def test_a_limit_of_micro_batches_is_kept_too():
    choice = search(three_stages((1000,) * 3, live=(1, 2, 3)), thorough=False)
    assert choice.candidates and all(fits(each.program.peak_live, (1, 2, 3)) for each in choice.candidates)
    assert all(each.modes[0] != "never" for each in choice.candidates)


def test_an_order_is_searched_where_time_allows():
    problem = three_stages((42, 42, 42))
    assert "list" in {each.name for each in search(problem).candidates}
    assert "list" not in {each.name for each in search(problem, thorough=False).candidates}


def test_many_stages_on_a_worker_are_tried_one_more_at_a_time():
    program = make_schedule("1f1b", workers=2, chunks=4, stages_per_worker=5)
    sizes = PipeBytes(tuple(StageBytes(kept=10) for _ in range(10)))
    tried = TriedModes(program, MicroBatch(Costs(), sizes), [MemoryLimit((65, 65))])
    assert [len(tries) for tries in tried.tries] == [11, 1]
    assert [peak for _, (peak,) in tried.tries[0]] == [100, 90, 80, 70, 60, 60, 50, 40, 30, 20, 10]
    (candidate,) = tried.fitting()
    assert [candidate.modes[stage] for stage in range(6)] == ["except_last"] * 4 + ["never"] * 2
    assert fits(peak_bytes(add_recompute(program, candidate.modes), sizes), (65, 65))


@pytest.mark.parametrize("wrong", ["only the first", "the most", "no limit"])
def test_a_wrong_choice_of_stages_is_caught(monkeypatch, wrong):
    """Mutants: one that takes any modes that fit, one that computes all again, and one that forgets the limits."""
    mutants = {
        "only the first": lambda fitting: fitting[-1:],
        "the most": lambda fitting: [dict.fromkeys(fitting[0], "always")] if fitting else [],
        "no limit": lambda fitting: least_modes(fitting) or [{0: "never"}],
    }
    monkeypatch.setattr("pippy.drivers.plan.choice.search.least_modes", mutants[wrong])
    with pytest.raises((AssertionError, ValueError, KeyError)):
        test_only_what_breaks_a_limit_is_computed_again()
        test_a_mode_that_is_given_stays()
        test_many_stages_on_a_worker_are_tried_one_more_at_a_time()
