"""The table of instructions is whole, and one more instruction is added by the recipe of docs/changing.md."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipeline
from pippy.drivers.lowering import lower
from pippy.drivers.plan import add_communication, make_schedule, parse_program, simulate, validate
from pippy.drivers.plan.language.errors import ProgramError
from pippy.drivers.plan.language.instructions import KINDS, Instruction, Kind, Op, Send, own_value
from pippy.drivers.plan.language.scanner import Form
from pippy.drivers.worker.executor import BINDERS
from tests.drivers.models import Chain
from tests.drivers.thread_cluster import thread_cluster


@dataclass(frozen=True, slots=True)
class Weigh(Instruction):
    """Note how many bytes a value has."""

    value: str
    microbatch: int


def with_weighing(program):
    """The pass that emits the new instruction: before each send."""
    return program.with_orders(
        [
            new
            for each in order
            for new in ([Weigh(each.value, each.microbatch), each] if isinstance(each, Send) else [each])
        ]
        for order in program.orders
    )


@pytest.fixture
def weighed(monkeypatch):
    """The bytes of each value that was weighed. The instruction is there as long as a test runs."""
    found = {}

    def weigh(step, key):
        found[key] = step.values[key].nbytes

    monkeypatch.setitem(KINDS, Weigh, Kind(Form("weigh {value}.{microbatch}"), takes=own_value))
    monkeypatch.setitem(BINDERS, Weigh, lambda bound, each: (weigh, (own_value(each),)))
    monkeypatch.setattr(
        lower, "add_communication", lambda *given, **named: with_weighing(add_communication(*given, **named))
    )
    return found


def test_each_kind_has_a_handler():
    in_steps = {key for key, kind in KINDS.items() if kind.exchange is None or kind.exchange.in_steps}
    assert BINDERS.keys() == in_steps
    assert {key for key in KINDS if isinstance(key, Op)} == set(Op)


@pytest.mark.usefixtures("weighed")
def test_a_new_instruction_is_written_read_proven_and_simulated():
    plain = add_communication(make_schedule("1f1b", workers=2, chunks=2))
    program = with_weighing(plain)
    assert "  weigh activation_0.1\n  send activation_0.1 to 1\n" in str(program)
    assert parse_program(str(program)) == program
    validate(program)
    assert simulate(program).timeline == simulate(plain).timeline
    late = replace(program, orders=((*program.orders[0], Weigh("activation_0", 1)), program.orders[1]))
    with pytest.raises(ProgramError, match=r"weigh activation_0\.1: needs activation_0\.1, which was freed"):
        validate(late)


@pytest.mark.parametrize("out_of_order", [False, True])
@pytest.mark.usefixtures("in_float64", "seeded")
def test_a_new_instruction_runs(weighed, out_of_order):
    model = Chain(3)
    plain = copy.deepcopy(model)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    with thread_cluster(3) as cluster:
        driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), cluster, check=False, out_of_order=out_of_order)
        driver.run(4, x, target)
        found = driver.gradients()
    nn.MSELoss()(plain(x), target).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    # 2 activations and 2 gradients for each of 4 micro-batches, of 2 rows of 8 numbers of 8 bytes
    assert len(weighed) == 4 * 4 and set(weighed.values()) == {2 * 8 * 8}
