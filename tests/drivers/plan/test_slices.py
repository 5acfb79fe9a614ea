"""Slices of sequences as micro-batches: the order of every schedule, what must hold for it, and how it is written."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import (
    add_communication,
    add_recompute,
    make_schedule,
    parse_program,
    render_text,
    simulate,
    validate,
)
from pippy.drivers.plan.language.errors import ArgumentError, ParseError, PlacementError, ProgramError
from pippy.drivers.plan.language.instructions import Op
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.orders.registry import REGISTRY
from tests.drivers.plan.graphs import with_random_graph
from tests.drivers.plan.test_properties import placements

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


def exchanged(program: Program, one: str, other: str) -> Program:
    """The program with two computations in each other's places."""
    swap = {one: other, other: one}
    texts = [f"  {swap.get(line.strip(), line.strip())}" if line.startswith("  ") else line for line in program.lines()]
    return parse_program("".join(f"{line}\n" for line in texts))


def test_a_slice_before_the_one_that_it_reads_is_a_fault():
    program = make_schedule("fill_drain", workers=1, chunks=2, slices=2)
    validate(program)
    reads = "worker 0, F0.1: comes before F0.0, whose keys and values it reads"
    with pytest.raises(ProgramError, match=reads):
        validate(exchanged(program, "F0.0", "F0.1"))
    gives = "worker 0, B0.2: comes before B0.3, which gives gradients of its keys and values"
    with pytest.raises(ProgramError, match=gives):
        validate(exchanged(program, "B0.2", "B0.3"))
    validate(exchanged(program, "F0.1", "F0.2"))  # another row's


def test_halves_of_backwards_are_held_to_the_same():
    program = make_schedule("zb_h1", workers=2, chunks=2, slices=2)
    with pytest.raises(ProgramError, match=r"worker 1, I1\.0: comes before I1\.1, which gives gradients of its keys"):
        validate(exchanged(program, "I1.0", "I1.1"))


def test_replicas_share_rows_and_not_slices():
    program = make_schedule("1f1b", workers=1, chunks=3, slices=4, replicas=2)
    assert program.shares == (range(8), range(8, 12))


def test_wrong_numbers_of_slices_are_refused():
    with pytest.raises(ArgumentError, match=r"slices=0"):
        make_schedule("1f1b", workers=1, chunks=2, slices=0)
    with pytest.raises(ArgumentError, match=r"chunks=1 for 2 replicas"):
        make_schedule("1f1b", workers=1, chunks=1, slices=4, replicas=2)
    text = str(make_schedule("1f1b", workers=1, chunks=2, slices=2))
    with pytest.raises(ParseError, match="line 6, column 8: 4 chunks are no rows of 3 slices"):
        parse_program(text.replace("slices 2", "slices 3"))
    with pytest.raises(ArgumentError, match="chunks=4 for 3 slices of each sequence"):
        program = parse_program(text)
        Program(program.schedule, program.placement, 4, program.orders, program.backward, slices=3)
