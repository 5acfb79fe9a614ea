"""Passes that rewrite programs: forwards computed again, slices of sequences."""

import random

import pytest
from hypothesis import assume, given, settings
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
from pippy.drivers.plan.language.errors import ArgumentError, PlacementError
from pippy.drivers.plan.language.instructions import Op
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.orders.schedule import B, F, I, R, W
from tests.drivers.plan.graphs import edges, with_random_graph
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


# Slices of sequences as micro-batches: the order of every schedule, what must hold for it, and how it is written.


TRAINING = [name for name, entry in REGISTRY.items() if entry.training]


@st.composite
def sliced_programs(draw):
    """Any schedule, on a placement that it is made for, or on any that it accepts."""
    name = draw(st.sampled_from(list(REGISTRY)))
    options = {
        "chunks": draw(st.integers(1, 8)),
        "slices": draw(st.integers(1, 8)),
        "replicas": draw(st.integers(1, 2)),
    }
    assume(options["chunks"] >= options["replicas"])
    if draw(st.booleans()):
        return make_schedule(name, workers=draw(st.integers(1, 5)), **options)
    placement = draw(placements())
    assume(placement.workers <= 6)
    try:
        return make_schedule(name, workers=placement.workers, placement=placement, **options)
    except PlacementError:
        assume(False)


@given(sliced_programs())
@settings(max_examples=40)
def test_every_schedule_goes_forward_by_slices_and_backward_from_the_last(program: Program):
    assert program.chunks == program.rows * program.slices
    for order, stages in ((program.computations[w], program.stages_of(w)) for w in range(program.workers)):
        for stage in stages:
            own = [each for each in order if each.stage == stage]
            forward, *backward = (
                [each.microbatch for each in own if each.op in ops]
                for ops in ([Op.FORWARD], [Op.BACKWARD, Op.BACKWARD_INPUT], [Op.BACKWARD, Op.BACKWARD_WEIGHT])
            )
            share = next(share for share in program.shares if forward[0] in share)
            rows = [list(share[at : at + program.slices]) for at in range(0, len(share), program.slices)]
            assert forward == list(share)
            last_first = [chunk for row in rows for chunk in reversed(row)]
            assert backward == [last_first if program.backward else []] * 2


@given(sliced_programs(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_a_program_with_slices_is_proven_for_any_graph_and_reads_as_it_is_written(program: Program, rng: random.Random):
    assert parse_program(str(program)) == program
    lowered = add_communication(with_random_graph(program, rng))
    validate(lowered)
    assert parse_program(str(lowered)) == lowered
    assert simulate(lowered).makespan >= 0


def test_the_order_of_1f1b():
    """That of Seq1F1B: a worker begins with a forward more for each slice but one."""
    program = make_schedule("1f1b", workers=2, chunks=2, slices=2)
    assert render_text(program) == (
        "0 | F0 F1 F2 .  .  B1 -- F3 B0 -- .  B3 -- B2 --\n1 | .  F0 F1 B1 -- F2 B0 -- F3 B3 -- B2 -- .  ."
    )


@pytest.mark.parametrize(("workers", "rows", "slices"), [(2, 4, 4), (4, 6, 3), (8, 16, 8)])
def test_what_1f1b_holds_and_how_long_it_takes(workers, rows, slices):
    """Slice by slice, the first worker holds as many slices as there are workers, and a row: not as many rows."""
    program = make_schedule("1f1b", workers=workers, chunks=rows, slices=slices)
    assert program.peak_live == program.memory == tuple(workers + slices - 1 - worker for worker in range(workers))
    # F costs 1, and B costs 2: the pipeline fills and drains by slices.
    assert simulate(program).makespan == 3 * (rows * slices + workers - 1)


@pytest.mark.parametrize("name", TRAINING)
def test_one_slice_is_the_schedule_itself(name):
    assert make_schedule(name, workers=2, chunks=4, slices=1) == make_schedule(name, workers=2, chunks=4)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_recompute_goes_with_slices(checkpoint):
    program = make_schedule("1f1b", workers=2, chunks=2, slices=3, checkpoint=checkpoint)
    validate(add_communication(program))
    assert program == add_recompute(make_schedule("1f1b", workers=2, chunks=2, slices=3), checkpoint)


def test_replicas_share_rows_and_not_slices():
    program = make_schedule("1f1b", workers=1, chunks=3, slices=4, replicas=2)
    assert program.shares == (range(8), range(8, 12))


def test_wrong_numbers_of_slices_are_refused():
    with pytest.raises(ArgumentError, match=r"slices=0"):
        make_schedule("1f1b", workers=1, chunks=2, slices=0)
    with pytest.raises(ArgumentError, match=r"chunks=1 for 2 replicas"):
        make_schedule("1f1b", workers=1, chunks=1, slices=4, replicas=2)
