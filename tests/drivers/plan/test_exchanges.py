"""Exchanges between workers: replicas, sums, and programs outside of steps."""

from dataclasses import replace

import pytest

from pippy.drivers.placement.placed_pipe import passing_on
from pippy.drivers.plan import add_communication, make_schedule, parse_program, render_text, simulate, validate
from pippy.drivers.plan.language.errors import ArgumentError, ProgramError
from pippy.drivers.plan.language.exchanges import ExchangeProgram
from pippy.drivers.plan.language.instructions import (
    Compute,
    Payload,
    ReceiveExchanged,
    Reduce,
    SendExchanged,
    parse_instruction,
)
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.communicate import exchange
from pippy.drivers.plan.proofs.validate import validate_exchange
from pippy.drivers.protocol.state import GradientBucket, ReplicatedParameter
from tests.drivers.plan.graphs import instructions, marked


@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "list"])
def test_each_replica_does_what_one_pipeline_does_with_as_many_micro_batches(name):
    program = make_schedule(name, workers=2, chunks=5, replicas=2, checkpoint="except_last")
    validate(add_communication(program))
    assert parse_program(str(add_communication(program))) == add_communication(program)
    for first, share in ((0, range(3)), (2, range(3, 5))):
        alone = make_schedule(name, workers=2, chunks=len(share), checkpoint="except_last")
        own = [
            [replace(each, microbatch=each.microbatch - share.start) for each in order]
            for order in program.computations[first : first + 2]
        ]
        assert own == [list(order) for order in alone.computations]
        assert program.peak_live[first : first + 2] == alone.peak_live
    assert (
        simulate(program).makespan
        == simulate(make_schedule(name, workers=2, chunks=3, checkpoint="except_last")).makespan
    )


def test_the_grid_of_two_replicas():
    assert render_text(make_schedule("1f1b", workers=2, chunks=5, replicas=2)).splitlines() == [
        "0 | F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
        "1 | .  F0 B0 -- F1 B1 -- F2 B2 -- .  .",
        "2 | F3 F4 .  .  B3 -- .  B4 -- .  .  .",
        "3 | .  F3 B3 -- F4 B4 -- .  .  .  .  .",
    ]


def test_gradients_of_a_stage_leave_right_after_its_last_backward():
    lowered = add_communication(make_schedule("interleaved_1f1b", workers=2, chunks=4, stages_per_worker=2, replicas=2))
    for worker, order in enumerate(lowered.orders):
        for stage in lowered.stages_of(worker):
            last = max(at for at, each in enumerate(order) if isinstance(each, Compute) and each.stage == stage)
            twin = (worker + 2) % 4
            left = order.index(SendExchanged(Payload.GRADIENTS, twin, f"stage {stage} part {twin // 2}"))
            assert left > last and not any(isinstance(each, Compute) for each in order[last + 1 : left])
            part = f"stage {stage} part {worker // 2}"
            own = order.index(Reduce(part))
            assert own > left and order[own + 1] == SendExchanged(Payload.SUM, twin, part)
    assert "reduce" not in str(add_communication(make_schedule("1f1b", workers=2, chunks=4)))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda order: [each for each in order if not isinstance(each, Reduce)], "reduce stage 1 part 1 is missing"),
        (lambda order: [*order, Reduce("stage 1 part 1")], "reduce stage 1 part 1: comes twice"),
        (lambda order: [Reduce("stage 1 part 1"), *order], "reduce stage 1 part 1: comes before receive gradients of"),
        (lambda order: [*order, Reduce("stage 0 part 1")], "does not belong to the sum of stage 0 part 1 on worker 2"),
        (
            lambda order: [replace(each, microbatch=0) if each in order[1:2] else each for each in order],
            "F1.0: stage 1 is on worker 1 for micro-batch 0",
        ),
    ],
)
def test_what_is_refused(change, fault):
    lowered = add_communication(make_schedule("1f1b", workers=2, chunks=4, replicas=2))
    with pytest.raises(ProgramError, match=fault):
        validate(lowered.with_orders([*lowered.orders[:3], change(lowered.orders[3])]))


def test_a_stage_is_not_reduced_where_there_is_one_pipeline():
    with pytest.raises(ProgramError, match="the program has no sum stage 0 part 0"):
        validate(put(add_communication(make_schedule("1f1b", workers=1, chunks=1)), 0, "reduce stage 0 part 0"))


def with_notes(stages=2, notes=(1,)):
    """Two replicas on workers 0, 1 and 2, 3, whose batch norms in some stages count together."""
    name = "1f1b" if stages == 2 else "interleaved_1f1b"
    program = make_schedule(name, workers=2, chunks=4, stages_per_worker=stages // 2, replicas=2)
    return add_communication(replace(program, notes=notes))


def test_notes_leave_right_after_the_last_forward_and_are_received_behind_all_computations():
    lowered = with_notes()
    assert [str(each) for each in lowered.orders[3]] == [
        *("receive activation_0.2 from 2", "F1.2", "free activation_0.2"),
        *("B1.2", "send gradient_0.2 to 2", "free gradient_0.2"),
        *("receive activation_0.3 from 2", "F1.3", "free activation_0.3", "send notes to 1"),
        *("B1.3", "send gradient_0.3 to 2", "free gradient_0.3", "send gradients of stage 1 part 0 to 1"),
        *("receive notes from 1", "receive gradients of stage 1 part 1 from 1", "reduce stage 1 part 1"),
        *("send sum of stage 1 part 1 to 1", "receive sum of stage 1 part 0 from 1"),
    ]
    assert "notes" not in " ".join(map(str, (*lowered.orders[0], *lowered.orders[2])))
    assert simulate(lowered) == simulate(replace(lowered, notes=(), orders=without_notes(lowered)))


def without_notes(program):
    return tuple(tuple(each for each in order if "notes" not in str(each)) for order in program.orders)


def test_the_notes_of_all_stages_of_a_worker_are_one_message():
    lowered = with_notes(stages=4, notes=(0, 2, 3))
    validate(lowered)
    assert [sum("notes" in str(each) for each in order) for order in lowered.orders] == [2, 2, 2, 2]
    for order in lowered.orders:
        last = max(at for at, each in enumerate(order) if str(each).startswith("F"))
        sent = next(at for at, each in enumerate(order) if str(each).startswith("send notes"))
        assert sent > last and not any(isinstance(each, Compute) for each in order[last + 1 : sent])


def moved(program, worker, text, before=None):
    """The program with an instruction of a worker before another one, or left out."""
    order, each = list(program.orders[worker]), parse_instruction(text)
    order.remove(each)
    if before is not None:
        order.insert(order.index(parse_instruction(before)), each)
    return program.with_orders([*program.orders[:worker], order, *program.orders[worker + 1 :]])


def put(program, worker, text):
    return program.with_orders(
        [*order, parse_instruction(text)] if at == worker else order for at, order in enumerate(program.orders)
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda it: moved(it, 1, "receive notes from 3"), "worker 1, at the end: receive notes from 3 is missing"),
        (lambda it: moved(it, 1, "receive notes from 3"), "worker 3, send notes to 1: is never received by worker 1"),
        (lambda it: moved(it, 3, "send notes to 1"), "worker 3, at the end: send notes to 1 is missing"),
        (lambda it: moved(it, 3, "send notes to 1", "F1.3"), "worker 3, send notes to 1: comes before F1.3"),
        (lambda it: put(it, 3, "send notes to 1"), "worker 3, send notes to 1: comes twice"),
        (
            lambda it: put(it, 3, "send notes to 2"),
            "worker 3, send notes to 2: these workers have no notes of batch norms",
        ),
        (
            lambda it: put(it, 0, "send notes to 2"),
            "worker 0, send notes to 2: these workers have no notes of batch norms",
        ),
        (
            lambda it: moved(it, 3, "receive notes from 1", "reduce stage 1 part 1"),
            r"receive gradients of stage 1 part 1 from 1: comes out of order: worker 1 sends notes of batch norms.0 first",
        ),
        (
            lambda it: moved(
                moved(it, 3, "receive notes from 1", "send notes to 1"), 1, "receive notes from 3", "send notes to 3"
            ),
            "circular wait:\n    worker 1 at receive notes from 3 waits for worker 3 to do send notes to 1\n"
            "    worker 3 at receive notes from 1 waits for worker 1 to do send notes to 3",
        ),
    ],
)
def test_what_is_refused_of_notes(change, fault):
    program = with_notes()
    validate(program)
    with pytest.raises(ProgramError, match=fault):
        validate(change(program))


def test_wrong_numbers():
    with pytest.raises(ArgumentError, match="chunks=1 for 2 replicas of the pipeline: each needs a micro-batch"):
        make_schedule("1f1b", workers=2, chunks=1, replicas=2)
    with pytest.raises(ArgumentError, match="replicas=0 must be a whole number of at least 1"):
        make_schedule("1f1b", workers=2, chunks=1, replicas=0)


# Programs of what workers pass on outside of a step: their text, and what their proof finds.


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("send parameters of stage 2 part 0 to 3", SendExchanged(Payload.PARAMETERS, 3, "stage 2 part 0")),
        ("receive parameters of emb.weight from 0", ReceiveExchanged(Payload.PARAMETERS, 0, "emb.weight")),
        ("send state of worker 1 to 2", SendExchanged(Payload.STATE, 2, 1)),
        ("receive state of worker 1 from 2", ReceiveExchanged(Payload.STATE, 2, 1)),
    ],
)
def test_each_instruction_is_written_and_read(text, instruction):
    assert str(instruction) == text and parse_instruction(text) == instruction


def states():
    """Three workers, each of which sends the copy of its state to the next."""
    return exchange("states", Payload.STATE, [(each, each, (each + 1) % 3) for each in range(3)])


def test_the_text():
    assert str(states()).splitlines() == [
        "exchange states",
        *("worker 0", "  send state of worker 0 to 1", "  receive state of worker 2 from 2"),
        *("worker 1", "  send state of worker 1 to 2", "  receive state of worker 0 from 0"),
        *("worker 2", "  send state of worker 2 to 0", "  receive state of worker 1 from 1"),
    ]
    assert [states().order_of(worker) for worker in (2, 3)] == [
        (SendExchanged(Payload.STATE, 0, 2), ReceiveExchanged(Payload.STATE, 1, 1)),
        (),
    ]
    assert str(exchange("states", Payload.STATE, [])) == "exchange states"


def test_a_parameter_is_passed_on_by_whoever_adds_up_its_gradients():
    def bucket(owner, name, *workers, sum):
        return GradientBucket(owner, (ReplicatedParameter(name, tuple((each, name) for each in workers)),), sum)

    buckets = [
        bucket(0, "a", 0, 2, 4, sum="stage 0 part 0"),
        bucket(0, "b", 0, 2, 4, sum="stage 0 part 0"),
        bucket(2, "c", 0, 2, 4, sum="stage 0 part 1"),
        bucket(1, "tied", 1, 2, sum="tied"),
    ]
    assert str(passing_on(buckets, {"a", "b", "tied"})).splitlines() == [
        "exchange parameters",
        *("worker 0", "  send parameters of stage 0 part 0 to 2", "  send parameters of stage 0 part 0 to 4"),
        *("worker 1", "  send parameters of tied to 2"),
        *("worker 2", "  receive parameters of stage 0 part 0 from 0", "  receive parameters of tied from 1"),
        *("worker 4", "  receive parameters of stage 0 part 0 from 0"),
    ]


CIRCLE = (
    "circular wait:\n"
    "    worker 0 at receive state of worker 1 from 1 waits for worker 1 to do send state of worker 1 to 0\n"
    "    worker 1 at receive state of worker 0 from 0 waits for worker 0 to do send state of worker 0 to 1"
)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("send state of worker 0 to 1 ← is never received by worker 1 |", []),
        ("send state of worker 0 to 5 ← is never received by worker 5 |", []),
        (
            "send parameters of w to 1 ← is never received by worker 1 | "
            "receive parameters of w from 1 ← is never sent by worker 1",
            [],
        ),
        (
            "send parameters of a to 1 / send parameters of b to 1 | receive parameters of b from 0 "
            "← comes out of order: worker 0 sends parameters of a.0 first / receive parameters of a from 0",
            [],
        ),
        (
            "receive state of worker 1 from 1 / send state of worker 0 to 1 | "
            "receive state of worker 0 from 0 / send state of worker 1 to 0",
            [CIRCLE],
        ),
    ],
)
def test_what_is_refused_outside_of_steps(text, whole):
    program = ExchangeProgram("of a test", instructions(marked(text)[0]))
    with pytest.raises(ProgramError, match="program of a test cannot run") as caught:
        validate_exchange(program)
    assert list(caught.value.faults) == marked(text)[1] + whole


@pytest.mark.parametrize("text", ["send parameters of stage 0 part 0 to 1", "receive state of worker 1 from 1"])
def test_they_are_in_no_step(text):
    with pytest.raises(ProgramError, match=f"worker 0, {text}: is in no step: workers do it in a program of its own"):
        validate(put(add_communication(make_schedule("1f1b", workers=2, chunks=2)), 0, text))
