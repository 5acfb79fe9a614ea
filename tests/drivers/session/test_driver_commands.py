"""The state machine in `DriverCommands`, without workers: every row of the table in its docstring."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.protocol.programs import Unload
from pippy.drivers.protocol.state import ReduceGradients, WorkerHooks
from pippy.drivers.session.driver_commands import DriverCommands, GradientState, NonFiniteGradients
from pippy.ir.base.surroundings import Surroundings

REDUCED, UNREDUCED, TO_DROP = GradientState.REDUCED, GradientState.UNREDUCED, GradientState.TO_DROP
WORKERS = (0, 1)


class FakeSession:
    """Takes commands, and gives them up when told: the latest first, as the real one does."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[int, Any], bool]] = []
        self.outstanding: list[Any] = []
        self.forgotten: list[int] = []
        self.told: list[Surroundings | None] = []
        log = {"starts": [0] * len(WORKERS), "half_changed_drivers": set(), "gone": frozenset()}
        self.broken, self.log = None, SimpleNamespace(**log)
        self.failing = False  # whether commands that are sent now fail
        self.lock, self.wait_all = nullcontext(), lambda: None

    def in_turn(self, do, driver):
        return do()

    def post(self, command):
        self.sent.append((dict(command.bodies), command.zero_grad))
        self.told.append(command.surroundings)
        self.outstanding.append(command)
        if self.failing:
            self.give_up()
            raise StepError("given up")
        return command

    def call(self, command):
        self.outstanding.remove(self.post(command))
        return {worker: f"answer {worker}" for worker in command.bodies}

    def give_up(self) -> None:
        for command in reversed(self.outstanding):
            command.undo()
        self.outstanding.clear()

    def drop(self, driver, workers) -> None:
        self.forgotten.append(driver)


@pytest.fixture
def session():
    return FakeSession()


def commands_in(state: GradientState, session: FakeSession, has_copies: bool = True) -> DriverCommands:
    nonfinite = NonFiniteGradients(None, ())  # type: ignore[arg-type]
    commands = DriverCommands(session, 7, WORKERS, has_copies, nonfinite)  # type: ignore[arg-type]
    commands.load(dict.fromkeys(WORKERS, "stages"), {})  # type: ignore[arg-type]
    commands.gradients = state
    session.sent.clear()
    session.told.clear()
    return commands


def step(commands: DriverCommands, trains: bool = True, reduce: bool = False) -> None:
    commands.post_step(dict.fromkeys(WORKERS, "step"), trains, reduce, None, Surroundings.current())  # type: ignore[arg-type]


def reduce_(commands: DriverCommands) -> None:
    commands.call_reducing(lambda reduce: dict.fromkeys(WORKERS, ReduceGradients()))


EVENTS = {
    "zero_grad": DriverCommands.zero_grad,
    "training step": step,
    "training step that reduces": lambda commands: step(commands, reduce=True),
    "other step": lambda commands: step(commands, trains=False),
    "call that reduces": reduce_,
    "other call": lambda commands: commands.call({0: "fetch"}),
}
TABLE = {
    "zero_grad": (TO_DROP, TO_DROP, TO_DROP),
    "training step": (UNREDUCED, UNREDUCED, UNREDUCED),
    "training step that reduces": (REDUCED, REDUCED, REDUCED),
    "other step": (REDUCED, UNREDUCED, REDUCED),
    "call that reduces": (REDUCED, REDUCED, REDUCED),
    "other call": (REDUCED, UNREDUCED, REDUCED),
}
CASES = [(event, before, after) for event, row in TABLE.items() for before, after in zip(GradientState, row)]


@pytest.mark.parametrize(("event", "before", "after"), CASES)
def test_the_table(session, event, before, after):
    commands = commands_in(before, session)
    EVENTS[event](commands)
    assert commands.gradients is after


@pytest.mark.parametrize(("event", "before"), [(event, before) for event, before, _ in CASES if event != "zero_grad"])
def test_a_command_that_is_given_up_leaves_the_state_before_it(session, event, before):
    commands = commands_in(before, session)
    commands.steps = 2
    session.failing = True
    with pytest.raises(StepError):
        EVENTS[event](commands)
    assert (commands.gradients, commands.steps) == (before, 2)


@pytest.mark.parametrize("before", [REDUCED, TO_DROP])
def test_a_training_step_without_copies(session, before):
    commands = commands_in(before, session, has_copies=False)
    step(commands)
    assert commands.gradients is REDUCED


@pytest.mark.parametrize("event", [event for event in EVENTS if event != "zero_grad"])
@pytest.mark.parametrize("before", GradientState)
def test_only_a_command_in_to_drop_says_to_drop_and_then_to_all(session, event, before):
    EVENTS[event](commands_in(before, session))
    ((bodies, zero),) = session.sent
    assert zero is (before is TO_DROP)
    assert not zero or set(bodies) == set(WORKERS)


def test_a_call_gives_the_answers_of_those_that_it_asked(session):
    assert commands_in(TO_DROP, session).call({1: "fetch"}) == {1: "answer 1"}


@pytest.mark.parametrize("before", GradientState)
def test_a_call_that_reduces_is_told_whether_to(session, before):
    told = []
    commands_in(before, session).call_reducing(lambda reduce: told.append(reduce) or {0: "norms"})
    assert told == [before is UNREDUCED]


@pytest.mark.parametrize("before", GradientState)
def test_several_steps_given_up_at_once(session, before):
    commands = commands_in(before, session)
    for trains in (True, False, True):
        step(commands, trains)
    session.give_up()
    assert (commands.gradients, commands.steps) == (before, 0)


@pytest.mark.parametrize("before", GradientState)
def test_zero_grad_is_not_lost_when_the_steps_before_it_are_given_up(session, before):
    commands = commands_in(before, session)
    step(commands)
    step(commands)
    commands.zero_grad()
    session.give_up()
    assert commands.gradients is TO_DROP


def test_a_step_before_and_one_after_zero_grad_are_given_up(session):
    commands = commands_in(UNREDUCED, session)
    step(commands)
    commands.zero_grad()
    step(commands)
    session.give_up()
    assert commands.gradients is TO_DROP


def test_the_last_step_before_an_update_is_as_many_steps_after_the_last_update(session):
    commands = commands_in(REDUCED, session)
    last = []
    for update in (commands.zero_grad, commands.parameters_updated, commands.zero_grad):
        for _ in range(3):
            last.append(commands.last_before_update)
            step(commands)
        update()
        update()  # an update without steps between says nothing
    assert last == [False] * 3 + [False, False, True] * 2


def test_flags_and_hooks_are_sent_when_they_change_and_again_after_a_step_was_given_up(session):
    commands = commands_in(REDUCED, session)
    flags = {0: {"submod_0": (True,)}}
    hooks = {0: WorkerHooks()}
    assert commands.flags_to_send({}, commands.hooks) is None
    for told in ((flags, commands.hooks), (flags, hooks)):
        assert commands.flags_to_send(*told) == told
        step(commands)
        assert commands.flags_to_send(*told) is None
    session.give_up()
    assert commands.flags_to_send(flags, hooks) == (flags, hooks)
    commands.call({0: "fetch"})
    assert commands.flags_due, "only a step tells them"


def test_a_closed_driver_sends_nothing(session):
    commands = commands_in(TO_DROP, session)
    commands.close()
    assert session.sent == [(dict.fromkeys(WORKERS, Unload()), False)]
    commands.close()
    for event in ("training step", "other call"):
        with pytest.raises(DriverError, match="closed"):
            EVENTS[event](commands)
    assert len(session.sent) == 1


def test_workers_drop_a_driver_that_is_gone_or_whose_stages_could_not_be_sent(session):
    commands = commands_in(REDUCED, session)
    del commands
    gc.collect()
    assert session.forgotten == [7]
    session.failing = True
    with pytest.raises(StepError):
        commands_in(REDUCED, session)
    assert session.forgotten == [7, 7]


def test_surroundings_are_told_when_they_change_and_again_after_a_command_was_given_up(session):
    commands = commands_in(REDUCED, session)
    step(commands)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(commands)
        inside = Surroundings.current()
        commands.call({0: "fetch"})
    commands.call({0: "fetch"})
    assert session.told == [None, inside, None, Surroundings.current()]
    assert [set(bodies) for bodies, _ in session.sent] == [{0, 1}, {0, 1}, {0}, {0, 1}], "told to all workers"
    session.failing = True
    with pytest.raises(StepError):
        step(commands)
    session.failing = False
    commands.call({0: "fetch"})
    assert session.told[-1] == Surroundings.current()
