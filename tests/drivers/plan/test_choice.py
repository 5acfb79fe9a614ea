"""The choice of a schedule: the best of all that could be written down."""

import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import Costs, add_recompute, make_schedule, simulate_with, validate
from pippy.drivers.plan.choice.problem import (
    TIE,
    LiveLimit,
    MemoryLimit,
    MicroBatch,
    Problem,
    byte_count,
    byte_text,
    limits_of,
)
from pippy.drivers.plan.choice.search import TriedModes, choose, least_modes, search, unfit
from pippy.drivers.plan.choice.search import fits as fits_in
from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes, peak_bytes
from pippy.drivers.plan.language.edges import Edge, Pass
from pippy.drivers.plan.language.errors import ArgumentError, ScheduleError
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.rewrites import MODES

ROWS = 16


def micro_batch(chunks):
    """Four stages: 100 bytes of parameters and gradients each, and 10 for each row."""
    rows = -(-ROWS // chunks)
    stage = StageBytes(parameters=50, gradients=50, kept=10 * rows)
    return MicroBatch(Costs([0.001 * rows + 0.0005] * 4, 0.001, 0.001), PipeBytes((stage,) * 4))


def problem(limit, chunks=(4,), workers=2):
    program = make_schedule("1f1b", workers=workers, chunks=1, stages_per_worker=4 // workers)
    return Problem(program, micro_batch, chunks, (MemoryLimit((limit,) * workers),))


def test_the_text_says_what_was_chosen_what_it_holds_and_what_it_costs():
    choice = search(problem(330), thorough=False)
    text = str(choice)
    assert f"{choice.schedule} with {choice.chunks} micro-batches: its step is predicted" in text
    assert re.search(r"worker 1, stages 2 3: \d+ B of 330 B", text) and text.count("<- chosen") == 1
    assert choice.checkpoint and f"{next(iter(choice.checkpoint))} {next(iter(choice.checkpoint.values()))}" in text
    assert re.search(r"the limit costs \d+%", text) and "left out: zb_v: " in text
    assert "guessed to take" in str(replace(choice, measured=False))
    free = search(problem(10**6), thorough=False)
    assert "none would take less" in free.why and free.checkpoint == {}


def test_what_a_worker_computes_and_waits_says_why():
    """More micro-batches compute longer, as each begins its computations, and wait less. The sums are made by hand."""
    choice = search(problem(10**6, chunks=(1, 2, 4, 8, 16)), thorough=False)
    (told,) = [line for line in str(choice).splitlines() if line.startswith("  why: ")]
    chosen, by_count = choice.chosen, {}
    for each in choice.candidates:
        if each.name == choice.schedule:
            by_count.setdefault(each.chunks, each)
    for count, each in by_count.items():
        costs = micro_batch(count).costs
        of_worker = 2 * costs.forward[0] + costs.backward_input + costs.backward_weight  # the last are of both stages
        assert each.computes == pytest.approx(count * of_worker) and each.waits + each.computes == each.seconds
    fewer, more = by_count[chosen.chunks // 2], by_count[chosen.chunks * 2]
    assert more.computes > chosen.computes and fewer.waits > chosen.waits > more.waits
    started = (
        f"  why: on average a worker computes {1e3 * chosen.computes:.1f} ms and waits {1e3 * chosen.waits:.1f} ms; in "
    )
    assert told.startswith(f"{started}{fewer.chunks} micro-batch")
    assert (
        f"it would compute {1e3 * fewer.computes:.1f} ms and wait {1e3 * fewer.waits:.1f} ms; in {more.chunks}" in told
    )
    assert (
        f"{1e3 * more.computes:.1f} ms, because each computation takes time to begin, and wait {1e3 * more.waits:.1f}"
        in told
    )


def test_the_text_says_why_each_schedule_is_left_out_and_what_all_limits_cost():
    """What breaks a limit with every number of micro-batches is told with the one that lacks least."""
    given = problem(330, chunks=(2, 4))
    tight = replace(given, limits=(LiveLimit((2, 2)), *given.limits), checkpoint="never")
    choice = search(tight, thorough=False)
    reasons = dict(choice.left_out)
    assert not choice.candidates and set(reasons) >= {"1f1b", "fill_drain", "zb_h1", "zb_v"}
    assert "V-shaped" in reasons["zb_v"]
    assert reasons["1f1b"] == "with 4 micro-batches it holds 4 stage-micro-batches on worker 0, and the limit is 2"
    assert f"  1f1b: {reasons['1f1b']}" in choice.refusal.splitlines()
    assert unfit(choice, "330") == choice.refusal  # more memory alone would not help
    again = replace(given, limits=(LiveLimit((3, 3)), MemoryLimit((600, 600))))
    choice = search(again, thorough=False)
    slower, chosen = choice.chosen.seconds / choice.unlimited.seconds - 1, choice.chosen
    assert slower > 0.01 and f"so the limits cost {slower:.0%}" in choice.why
    assert f"{chosen.peak_live[0]} of 3 stage-micro-batches, {chosen.peak_bytes[0]} B of 600 B" in str(choice)
    assert all(again.refusal(each) == "" for each in choice.candidates)


@pytest.mark.parametrize(("limit", "chunks"), [(215, 16), (230, 6)])
def test_what_is_advised_fits(limit, chunks):
    tight = problem(limit)
    said = unfit(search(tight, thorough=False), repr(limit), more_chunks=(5, chunks))
    start = (
        rf"memory={limit} is too little: the nearest, \w+ with 4 micro-batches, with forwards of stages 0 1 2 computed "
    )
    assert re.match(start + r"again, holds 240 B on worker \d \(100 B parameters, 100 B gradients, 40 B kept\)", said)
    assert said.endswith(f"would fit: memory='240B', or {chunks} micro-batches, or 4 workers for these stages")
    assert fits_in(replace(tight, limits=(MemoryLimit((240, 240)),)))
    assert fits_in(problem(limit, (chunks,))) and fits_in(problem(limit, workers=4))
    assert not fits_in(tight) and not fits_in(problem(limit, (5,)))


def test_where_parameters_alone_are_too_much_only_a_limit_or_another_cut_helps():
    tight = problem(90, workers=4)
    said = unfit(search(tight, thorough=False), "90", more_chunks=(8, 16))
    (enough,) = re.findall(r"What would fit: memory='(\w+)', or a cut into more stages on more workers$", said)
    assert search(problem(byte_count(enough), workers=4), thorough=False).candidates


def test_sizes_are_read_and_shown():
    assert [byte_count(text) for text in ("12GiB", " 1.5 kb ", ".5TiB", 12)] == [12 * 2**30, 1500, 2**39, 12]
    for count in (1, 999, 1024, 1025, 10**6, 3 * 2**30 + 1, 2**40 - 1, 7 * 2**45):
        assert count <= byte_count(byte_text(count)) <= count * 1.02
    assert limits_of("1KiB", 2) == (1024, 1024)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("12", r"memory='12': it has no unit; the units are B, KB"),
        ("12 Gi", r"memory='12 Gi': give bytes, as in \"12GiB\""),
        (0, "memory=0: give bytes"),
        (-5, "memory=-5: give bytes"),
        (True, "memory=True: give bytes"),
        (1.5, "memory=1.5: give bytes"),
        ("0GiB", "memory='0GiB': give bytes"),
        (b"1GiB", "memory=b'1GiB': give bytes"),
        (["1GiB"], r"memory=\['1GiB'\] has 1 sizes for 2 workers; give one, or one each"),
        (["1GiB", None], "memory=None: give bytes"),
        ({0: "1GiB"}, r"memory=\{0: '1GiB'\}: give a size for each worker, 0 to 1, or one for all"),
        ({0: 1, 1: 1, 2: 1}, "give a size for each worker"),
    ],
)
def test_what_is_no_size_is_refused(given, message):
    with pytest.raises(ArgumentError, match=message):
        limits_of(given, workers=2)


# The chosen schedule is the best of all that can be made and simulated, one by one, and keeps the limits.


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


def by_hand(program, costs, most):
    """What each schedule takes, and holds at most, computed one by one."""
    for name, entry in REGISTRY.items():
        options = {"costs": costs, "memory": most} if name == "list" else {}
        try:
            if entry.training:
                sizes = {"workers": program.workers, "chunks": program.chunks, "placement": program.placement}
                made = make_schedule(name, **sizes, **options)
                if most is None or max(made.peak_live) <= most:
                    yield name, (simulate_with(made, costs).makespan, max(made.peak_live), sum(made.peak_live))
        except ScheduleError:
            continue


@settings(deadline=None, max_examples=60)
@given(problems(), st.none() | st.integers(2, 5))
def test_the_choice_is_the_best_of_all_that_keep_the_limit(problem, most):
    program, costs = problem
    choice = choose(Problem.of(program, costs, [] if most is None else [LiveLimit((most,) * program.workers)]))
    expected = dict(by_hand(program, costs, most))
    assert {each.name: each.seconds for each in choice.candidates} == {name: each[0] for name, each in expected.items()}
    alike = {name: each for name, each in expected.items() if each[0] <= min(expected.values())[0] * (1 + TIE)}
    assert choice.schedule in alike
    assert choice.chosen.memory == min((held, total) for _, held, total in alike.values())
    assert all(why and name not in expected for name, why in choice.left_out)
    assert max(choice.program.peak_live) <= (most or 99)
    validate(choice.program)


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


# What the search finds is the best of all that could be written down, one by one; and a search that is wrong is caught.


COSTS, KEPT = st.integers(1, 9), st.integers(0, 12)


@st.composite
def limited(draw):
    workers, each = draw(st.sampled_from([(1, 2), (2, 1), (3, 1)]))
    program = make_schedule("1f1b", workers=workers, chunks=1, stages_per_worker=each, placement="v")
    rows, stages = 8, program.stages
    costs = [draw(st.lists(COSTS, min_size=stages, max_size=stages)) for _ in range(3)]
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


def every_way(problem):
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
@given(limited())
def test_the_fastest_that_fits_is_found(problem):
    every = list(every_way(problem))
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
@given(limited(), st.data())
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
