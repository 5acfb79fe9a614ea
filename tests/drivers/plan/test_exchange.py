"""Programs of what workers pass on outside of a step: their text, and what their proof finds."""

from dataclasses import replace

import pytest

from pippy.drivers.placement.placed_pipe import passing_on
from pippy.drivers.plan import add_communication, make_schedule, validate
from pippy.drivers.plan.language.errors import ProgramError
from pippy.drivers.plan.language.exchanges import ExchangeProgram
from pippy.drivers.plan.language.instructions import (
    ReceiveParameters,
    ReceiveState,
    SendParameters,
    SendState,
    parse_instruction,
)
from pippy.drivers.plan.passes.communicate import exchange
from pippy.drivers.plan.proofs.validate import validate_exchange
from pippy.drivers.protocol.state import GradientBucket, ReplicatedParameter


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("send parameters of stage 2 part 0 to 3", SendParameters("stage 2 part 0", 3)),
        ("receive parameters of emb.weight from 0", ReceiveParameters("emb.weight", 0)),
        ("send state of worker 1 to 2", SendState(1, 2)),
        ("receive state of worker 1 from 2", ReceiveState(1, 2)),
    ],
)
def test_each_instruction_is_written_and_read(text, instruction):
    assert str(instruction) == text and parse_instruction(text) == instruction


def states():
    """Three workers, each of which sends the copy of its state to the next."""
    return exchange("states", [(SendState(each, (each + 1) % 3), ReceiveState(each, each)) for each in range(3)])


def test_the_text():
    assert str(states()).splitlines() == [
        "exchange states",
        *("worker 0", "  send state of worker 0 to 1", "  receive state of worker 2 from 2"),
        *("worker 1", "  send state of worker 1 to 2", "  receive state of worker 0 from 0"),
        *("worker 2", "  send state of worker 2 to 0", "  receive state of worker 1 from 1"),
    ]
    assert [states().order_of(worker) for worker in (2, 3)] == [(SendState(2, 0), ReceiveState(1, 1)), ()]
    assert str(exchange("states", [])) == "exchange states"


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


@pytest.mark.parametrize(
    ("orders", "faults"),
    [
        (
            [["send state of worker 0 to 1"], []],
            ["worker 0, send state of worker 0 to 1: is never received by worker 1"],
        ),
        (
            [["send state of worker 0 to 5"], []],
            ["worker 0, send state of worker 0 to 5: is never received by worker 5"],
        ),
        (
            [["send parameters of w to 1"], ["receive parameters of w from 1"]],
            [
                "worker 0, send parameters of w to 1: is never received by worker 1",
                "worker 1, receive parameters of w from 1: is never sent by worker 1",
            ],
        ),
        (
            [
                ["send parameters of a to 1", "send parameters of b to 1"],
                ["receive parameters of b from 0", "receive parameters of a from 0"],
            ],
            ["worker 1, receive parameters of b from 0: comes out of order: worker 0 sends parameters of a.0 first"],
        ),
        (
            [
                ["receive state of worker 1 from 1", "send state of worker 0 to 1"],
                ["receive state of worker 0 from 0", "send state of worker 1 to 0"],
            ],
            [
                "circular wait:\n"
                "    worker 0 at receive state of worker 1 from 1 waits for worker 1 to do send state of worker 1 to 0\n"
                "    worker 1 at receive state of worker 0 from 0 waits for worker 0 to do send state of worker 0 to 1"
            ],
        ),
    ],
)
def test_what_is_refused(orders, faults):
    program = ExchangeProgram("of a test", tuple(tuple(map(parse_instruction, order)) for order in orders))
    with pytest.raises(ProgramError, match="program of a test cannot run") as caught:
        validate_exchange(program)
    assert list(caught.value.faults) == faults


@pytest.mark.parametrize("text", ["send parameters of stage 0 part 0 to 1", "receive state of worker 1 from 1"])
def test_they_are_in_no_step(text):
    program = add_communication(make_schedule("1f1b", workers=2, chunks=2))
    order = (*program.orders[0], parse_instruction(text))
    with pytest.raises(ProgramError, match=f"worker 0, {text}: is in no step: workers do it in a program of its own"):
        validate(replace(program, orders=(order, program.orders[1])))
