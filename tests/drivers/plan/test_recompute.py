"""The instruction R: where it is put, what a program with it must be, how long it takes and what is held."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import (
    Costs,
    add_communication,
    add_recompute,
    make_schedule,
    parse_program,
    render_svg,
    render_text,
    simulate,
    simulate_with,
    validate,
)
from pippy.drivers.plan.language.edges import Checkpoints
from pippy.drivers.plan.language.errors import ArgumentError, ParseError, ProgramError
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.orders.schedule import B, F, I, R, W
from tests.drivers.plan.build import build, edges
from tests.drivers.plan.graphs import with_random_graph
from tests.drivers.plan.test_properties import placements

SIZES = [(1, 1), (1, 5), (2, 3), (3, 3), (4, 8), (5, 2)]


def makespan(workers, chunks, checkpoint, early=True):
    program = make_schedule("fill_drain", workers=workers, chunks=chunks, checkpoint=checkpoint)
    return simulate(add_communication(program, early_recompute=early)).makespan


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_how_long_fill_drain_takes_with_recompute(n, m):
    """F and R cost 1, B costs 2. Done early, only the last stage's recompute takes time."""
    assert makespan(n, m, "never") == 3 * (m + n - 1)
    assert makespan(n, m, "always", early=False) == 4 * (m + n - 1)
    assert makespan(n, m, "always") == 4 * m + 3 * (n - 1)
    assert makespan(n, m, "except_last") == makespan(n, m, "always") - 1


def test_the_grid():
    program = make_schedule("1f1b", workers=2, chunks=3, checkpoint="always")
    assert render_text(program) == (
        "0 | F0 F1 R0 .  .  B0 -- F2 R1 B1 -- R2 .  B2 --\n1 | .  F0 R0 B0 -- F1 R1 B1 -- F2 R2 B2 -- .  ."
    )
    assert render_svg(program).count("<title>R") == 6


@pytest.mark.parametrize("name", [name for name, entry in REGISTRY.items() if entry.training])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", {0: "always", 1: "except_last"}], ids=str)
def test_every_schedule_takes_it(name, checkpoint):
    rng = random.Random(name)
    for chunks in (1, 3, 6):
        plain = make_schedule(name, workers=2, chunks=chunks)
        program = make_schedule(name, workers=2, chunks=chunks, checkpoint=checkpoint)
        assert program.checkpoints or checkpoint == "except_last"
        for order, without in zip(program.computations, plain.computations):
            assert [each for each in order if each.op != R] == list(without)
        assert all(now <= before for now, before in zip(program.peak_live, plain.peak_live))
        assert program.memory == program.peak_live or not program.checkpoints
        graphed = with_random_graph(program, rng)
        for each in (program, add_communication(program), graphed, add_communication(graphed)):
            validate(each)
            assert parse_program(str(each)) == each
        assert simulate(program).makespan >= simulate(plain).makespan


@given(placements(), st.integers(1, 5), st.sampled_from(["fill_drain", "1f1b", "interleaved_1f1b"]), st.data())
@settings(max_examples=15)
def test_any_placement_and_any_modes(placement, chunks, name, data):
    modes = data.draw(
        st.dictionaries(st.integers(0, placement.stages - 1), st.sampled_from(["always", "except_last", "never"]))
    )
    program = make_schedule(name, workers=placement.workers, chunks=chunks, placement=placement, checkpoint=modes)
    for stage in range(placement.stages):
        kept_ones = kept(program, stage)
        assert kept_ones == [] if modes.get(stage) == "always" else chunks - 1 in kept_ones
        assert modes.get(stage, "never") != "never" or len(kept_ones) == chunks
    lowered = add_communication(program)
    validate(lowered)
    assert lowered.computations == program.computations
    assert parse_program(str(lowered)) == lowered


def kept(program, stage):
    """The micro-batches whose forward is not computed again."""
    return [chunk for chunk in range(program.chunks) if (stage, chunk) not in program.checkpointed]


def test_except_last_leaves_out_the_last_and_what_is_next():
    program = make_schedule("1f1b", workers=4, chunks=8, checkpoint="except_last")
    assert [kept(program, stage) for stage in range(4)] == [[7], [7], [7], list(range(8))]
    program = make_schedule("zb_h1", workers=2, chunks=3, checkpoint="except_last")
    assert [kept(program, stage) for stage in range(2)] == [[2], [0, 1, 2]]
    program = make_schedule("fill_drain", workers=3, chunks=4, checkpoint="except_last")
    assert [kept(program, stage) for stage in range(3)] == [[3]] * 3


def test_peaks():
    """With recompute a worker holds one micro-batch at a time, and the inputs of the others, which do not count."""
    assert make_schedule("fill_drain", workers=2, chunks=5, checkpoint="always").peak_live == (1, 1)
    assert make_schedule("fill_drain", workers=2, chunks=5, checkpoint="except_last").peak_live == (2, 2)
    assert make_schedule("1f1b", workers=3, chunks=5, checkpoint={0: "always"}).peak_live == (1, 2, 1)
    assert make_schedule("zb_h1", workers=2, chunks=4, checkpoint="always").peak_live == (1, 2)


def test_the_recompute_has_a_cost_of_its_own():
    program = make_schedule("1f1b", workers=1, chunks=2, checkpoint="always")
    assert simulate(program).makespan == 8
    assert simulate(program, recompute=0.5).makespan == 7
    assert simulate_with(program, Costs(forward=2.0, recompute=[1.0])).makespan == 10


FAULTS = {
    "F0.0, F0.1, B0.0, R0.1, B0.1": "B0.0: comes before R0.0",
    "F0.0, F0.1, R0.0, R0.0, B0.0, R0.1, B0.1": "R0.0: is computed twice",
    "F0.0, F0.1, B0.0, R0.0, R0.1, B0.1": "R0.0: is computed in B0.0 already",
    "F0.0, R0.1, F0.1, R0.0, B0.0, B0.1": "R0.1: comes before F0.1",
    "F0.0, F0.1, R0.0, B0.0, R0.1, I0.1, R0.1, W0.1": "R0.1: is computed in I0.1 already",
}


@pytest.mark.parametrize("orders", FAULTS)
def test_a_recompute_that_is_missing_or_misplaced_is_refused(orders):
    program = build(orders, (0,), chunks=2, checkpoints=(Checkpoints(0, (0, 1)),))
    with pytest.raises(ProgramError) as caught:
        validate(program)
    assert FAULTS[orders] in str(caught.value)


def test_a_recompute_of_what_is_kept_is_refused():
    with pytest.raises(ProgramError, match=r"R0\.1: has nothing to compute again: F0\.1 keeps what the backward needs"):
        validate(build("F0.0, F0.1, R0.0, B0.0, R0.1, B0.1", (0,), chunks=2, checkpoints=(Checkpoints(0, (0,)),)))


def test_backwards_that_a_graph_has_not_take_their_recompute_with_them():
    program = make_schedule("1f1b", workers=2, chunks=2, checkpoint="always").for_graph(edges("x F0 -> F1"), [1])
    assert [{each.op for each in order} for order in program.computations] == [{F}, {F, R, B}]
    validate(program)


def test_halves_come_after_it():
    program = make_schedule("zb_h1", workers=2, chunks=2, checkpoint="always")
    assert [each.op for each in program.computations[0] if each.microbatch == 0] == [F, R, I, W]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sometimes", "'sometimes' is no mode; take one of 'always', 'except_last', 'never'"),
        ({0: "often"}, "'often' is no mode"),
        ({2: "always"}, "there is no stage 2; there are 0 to 1"),
        ({"a": "always"}, "there is no stage 'a'"),
        (True, "True is no mode"),
        (["always"], r"\['always'\] is no mode"),
    ],
)
def test_an_unknown_mode_or_stage_is_refused(given, message):
    for name in ("1f1b", "forward_only"):
        with pytest.raises(ArgumentError, match=message):
            make_schedule(name, workers=2, chunks=2, checkpoint=given)


def test_a_program_that_says_it_already_is_not_changed():
    lowered = add_communication(make_schedule("1f1b", workers=2, chunks=2))
    again = make_schedule("1f1b", workers=2, chunks=2, checkpoint="always")
    assert add_recompute(lowered, "never") is lowered
    for program in (lowered, again):
        with pytest.raises(ArgumentError, match=r"leave checkpoint out to run it as it is"):
            add_recompute(program, "always")


TEXT = str(make_schedule("fill_drain", workers=2, chunks=5, checkpoint={0: "always", 1: "except_last"}))


@pytest.mark.parametrize(
    ("old", "new", "column", "message"),
    [
        ("checkpoint 0 0-4", "checkpoint 0 0-5", 17, "there is no micro-batch 5 of 5"),
        ("checkpoint 0 0-4", "checkpoint 0", 13, "expected a micro-batch number"),
        ("checkpoint 0 0-4", "checkpoint 0 0-1 2-4", 16, "write this line as 'checkpoint 0 0-4'"),
        ("checkpoint 0 0-4", "checkpoint 0 3 1", 12, "name each micro-batch once, in order"),
        ("checkpoint 0 0-4", "checkpoint 2 0-4", 12, "there is no stage 2 of 2"),
        ("checkpoint 0 0-4", "checkpoint 1 0-4", 12, "name each stage once, in order"),
        ("backward all", "backward 1", 12, "stage 0 has no backward"),
    ],
)
def test_a_line_of_checkpoints_misspelt(old, new, column, message):
    assert "checkpoint 0 0-4\ncheckpoint 1 0-3\n" in TEXT
    with pytest.raises(ParseError) as caught:
        parse_program(TEXT.replace(old, new, 1))
    assert message in str(caught.value)
    assert caught.value.column == column


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ((Checkpoints(0, ()),), "must name at least one micro-batch"),
        ((Checkpoints(0, (1, 0)),), "each once, in order"),
        ((Checkpoints(0, (0, 2)),), "the program has micro-batches 0 to 1"),
        ((Checkpoints(1, (0,)),), "stage 1 has no backward"),
        ((Checkpoints(0, (0,)), Checkpoints(0, (1,))), "must name each stage once"),
    ],
)
def test_checkpoints_that_mean_nothing_are_refused(checkpoints, message):
    with pytest.raises(ArgumentError, match=message):
        build("F0.0, F0.1, R0.0, B0.0, B0.1", (0,), chunks=2, checkpoints=checkpoints)
