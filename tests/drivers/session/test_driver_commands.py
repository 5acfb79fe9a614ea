"""One driver's commands, its session, and what is told of compiling."""

import gc
import io
import os
import pickle
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, pipeline
from pippy.drivers.base.errors import ClusterError, DriverError, StepError, WorkerLostError
from pippy.drivers.base.process_signs import Look, Sign
from pippy.drivers.protocol.programs import Unload
from pippy.drivers.protocol.state import ChangeGradients, WorkerHooks
from pippy.drivers.session.calls import Address, PendingCall
from pippy.drivers.session.driver_commands import DriverCommands, GradientState, NonFiniteGradients
from pippy.drivers.session.session import Session
from pippy.drivers.session.told import CompileProgress
from pippy.drivers.wire.messages.controller_messages import ControllerConnections
from pippy.drivers.wire.pickling import pickle_message
from pippy.drivers.worker.compiled.pieces import PieceCompiler
from pippy.ir.base.surroundings import Surroundings
from tests.drivers.interrupted_everywhere import lost, places
from tests.drivers.models import Chain
from tests.drivers.worker.test_inductor import layers, trained

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
    commands.known = replace(commands.known, state=state)
    session.sent.clear()
    session.told.clear()
    return commands


def step(commands: DriverCommands, trains: bool = True, reduce: bool = False) -> None:
    commands.post_step(dict.fromkeys(WORKERS, "step"), trains, reduce, None, Surroundings.current())  # type: ignore[arg-type]


def reduce_(commands: DriverCommands) -> None:
    commands.call_reducing(lambda reduce: dict.fromkeys(WORKERS, ChangeGradients(reduce)))


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
    assert commands.known.state is after


@pytest.mark.parametrize(("event", "before"), [(event, before) for event, before, _ in CASES if event != "zero_grad"])
def test_a_command_that_is_given_up_leaves_the_state_before_it(session, event, before):
    commands = commands_in(before, session)
    commands.known = replace(commands.known, steps=2)
    session.failing = True
    with pytest.raises(StepError):
        EVENTS[event](commands)
    assert (commands.known.state, commands.known.steps) == (before, 2)


@pytest.mark.parametrize("before", [REDUCED, TO_DROP])
def test_a_training_step_without_copies(session, before):
    commands = commands_in(before, session, has_copies=False)
    step(commands)
    assert commands.known.state is REDUCED


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
    assert (commands.known.state, commands.known.steps) == (before, 0)


@pytest.mark.parametrize("before", GradientState)
def test_zero_grad_is_not_lost_when_the_steps_before_it_are_given_up(session, before):
    commands = commands_in(before, session)
    step(commands)
    step(commands)
    commands.zero_grad()
    session.give_up()
    assert commands.known.state is TO_DROP


def test_a_step_before_and_one_after_zero_grad_are_given_up(session):
    commands = commands_in(UNREDUCED, session)
    step(commands)
    commands.zero_grad()
    step(commands)
    session.give_up()
    assert commands.known.state is TO_DROP


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


# What a call that failed says of its worker: a worker that answers a ping after it lives.


class Pings(Session):
    """A controller without workers, whose pings end as given: with an error, an answer, or not at all."""

    def __init__(self, end):
        super().__init__([Address("worker0", "here", 1)], timeout=0.05)
        self.end = end

    def ping(self, worker):
        future = torch.futures.Future()
        if isinstance(self.end, Exception):
            future.set_exception(self.end)
        elif self.end is not None:
            future.set_result(pickle_message(self.end))
        return PendingCall(worker, "ping", future)


ENDS = [
    ("pong", ClusterError, "^a call to worker 0 .Step. failed:\nthe call broke$"),
    (RuntimeError("refused\nby the peer"), WorkerLostError, "the call broke, and a ping failed: by the peer"),
    (None, WorkerLostError, "the call broke, and it left a ping unanswered for 0.05 s"),
]


@pytest.mark.parametrize(("end", "kind", "words"), ENDS)
def test_a_call_that_failed(end, kind, words):
    """Whatever a ping raised was dropped, so nobody could see why its worker was taken for lost."""
    session, future = Pings(end), torch.futures.Future()
    future.set_exception(RuntimeError("the call broke"))
    with pytest.raises(kind, match=words) as caught:
        session.answer(PendingCall(0, "Step", future))
    assert type(caught.value) is kind
    assert bool(session.broken) is (kind is WorkerLostError)


def test_a_worker_whose_connection_for_messages_breaks_alone_is_lost():
    """One of its two connections was cut, and a ping went through the other: that raised a ClusterError of no worker."""
    session, future = Pings("pong"), torch.futures.Future()
    future.set_exception(ConnectionError("it closed its end of the socket"))
    with pytest.raises(WorkerLostError, match="the connection to it broke: it closed its end of the socket;"):
        session.answer(PendingCall(0, "Command", future))
    assert session.broken


def test_a_worker_that_made_no_progress_is_not_said_to_be_busy(monkeypatch):
    """The threads that wait for Python's lock took two ticks of the tenth of a second for which it was looked at."""
    now = Sign(10.0, "S", 1.02, 0, 0)
    monkeypatch.setattr(Look, "at", lambda pid: Look(replace(now, time=9.9, computed=1.0), now))
    session = Session([Address("worker0", "here", 1, is_here=True)], timeout=1.0)
    assert "it is busy" in session.unanswered(0)
    assert "it waits" in session.unanswered(0, since=replace(now, time=9.0, computed=1.0))


class LostMeanwhile(ControllerConnections):
    """Another thread finds that a worker is lost, while this one waits for it."""

    def wait(self, wakeup, timeout):
        self.session.mark_lost(0, "killed by SIGKILL")


def test_a_wait_says_which_worker_is_lost_though_another_thread_has_found_it():
    """It raised a ClusterError of no worker, so that a script which looks for a lost worker did not find it."""
    messages = LostMeanwhile()
    messages.session = session = Session([Address("worker0", "here", 1)], messages=messages)
    with pytest.raises(WorkerLostError, match=r"worker0.*killed by SIGKILL"):
        session.answer(PendingCall(0, "Step", torch.futures.Future()))
    with pytest.raises(WorkerLostError, match=r"lost a worker and cannot go on.*killed by SIGKILL") as later:
        session.check()  # as at the beginning of a step
    assert (later.value.index, later.value.how) == (0, "killed by SIGKILL")
    assert isinstance(pickle.loads(pickle.dumps(later.value)), WorkerLostError)


class Lid(ControllerConnections):
    """A worker answers a ping once both run again: they are stopped in the wait after it."""

    def __init__(self):
        super().__init__()
        self.waits = []
        self.ping = torch.futures.Future()

    def urgent(self, worker, pickled):
        return self.ping

    def wait(self, wakeup, timeout):
        self.waits.append(timeout)
        time.sleep(0.5 if len(self.waits) == 2 else timeout if len(self.waits) == 1 else 0)
        if len(self.waits) == 3:
            self.ping.set_result(pickle_message("pong"))


def test_time_in_which_the_controller_was_stopped_too_does_not_count():
    """As after the lid of a laptop was closed: the workers have had no time to answer the ping either."""
    lid = Lid()
    session = Session([Address("worker0", "here", 1)], timeout=0.1, interval=0.05, messages=lid)
    calls = [PendingCall(0, "Step", torch.futures.Future())]
    waiting = session.completed(calls, timeout=0.3)
    lid.ping.add_done_callback(lambda _: calls[0].future.set_result(pickle_message("done")))
    assert next(waiting).answer == "done"
    assert not session.broken


def test_ctrl_c_leaves_nobody_waiting_for_a_turn_wherever_it_comes():
    session = Session([Address("worker0", "here", 1)])
    files = "drivers/session/session.py", "session/command_log.py"

    def take_a_turn():
        session.in_turn(lambda: session.in_turn(int), driver=0)

    found = places(take_a_turn, files)
    assert len(found) > 10
    for place in found:
        assert not lost(take_a_turn, files, place)
        assert not session.log.turns


def test_threads_take_turns_in_the_order_in_which_they_came():
    session, order = Session([Address("worker0", "here", 1)]), []

    def take_a_turn(number):
        session.in_turn(lambda: order.append(number))

    def hold():
        for number, thread in enumerate(threads):
            thread.start()
            while len(session.log.turns) < number + 2:
                time.sleep(0)
        order.append("first")

    threads = [threading.Thread(target=take_a_turn, args=(number,)) for number in range(4)]
    session.in_turn(hold)
    for thread in threads:
        thread.join(30)
    assert order == ["first", 0, 1, 2, 3] and not session.log.turns


# The line that shows what workers compile: on a terminal, while a call waits, and cleared afterwards.


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Waits:
    """A backend that waits for the test: its code is the graph."""

    def __init__(self, folder):
        self.folder = folder
        os.mkfifo(folder / "go")

    def __call__(self, graph, inputs):
        (self.folder / "go").open().close()  # this waits until another has it open for writing
        return graph

    def go_on(self):
        """Let all pieces be compiled from now on."""
        os.open(self.folder / "go", os.O_RDWR)


def test_the_line_follows_the_workers_and_is_cleared():
    terminal = Terminal()
    progress = CompileProgress(["worker0", "worker1"], terminal)
    progress.show(0, None)
    assert terminal.getvalue() == ""
    progress.show(0, (1, 3))
    progress.show(1, (0, 2))
    assert terminal.getvalue().endswith("\rcompiling: worker0 1/3, worker1 0/2\x1b[K")
    progress.show(0, None)
    assert terminal.getvalue().endswith("\rcompiling: worker0 1/3, worker1 0/2\x1b[K\rcompiling: worker1 0/2\x1b[K")
    progress.end()
    progress.end()
    assert terminal.getvalue().endswith("worker1 0/2\x1b[K\r\x1b[K")


def test_a_file_gets_nothing():
    file = io.StringIO()
    progress = CompileProgress(["worker0"], file)
    progress.show(0, (1, 3))
    progress.end()
    assert file.getvalue() == ""


def test_a_compiler_says_how_far_it_is():
    seen = []

    class Watched:
        def compile(self, piece, key, wait):
            seen.append(compiler.progress)
            return piece.module

    compiler = PieceCompiler(Watched())
    trained(layers(), compiler, halves=True)
    assert seen == [(0, 3), (1, 3), (2, 3)] and compiler.progress is None


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_step_that_compiles_shows_the_line_and_clears_it(cluster, monkeypatch, tmp_path, stream):
    """The pieces are compiled when both workers have told that they compile."""
    waits, session, told = Waits(tmp_path), cluster.session, set()

    def heard(worker, message):
        shown(worker, message)
        if message is not None and worker not in told:
            told.add(worker)
            if len(told) == 2:
                waits.go_on()

    shown = session.heard
    monkeypatch.setattr(session, "heard", heard)
    monkeypatch.setattr(session, "interval", 0.05)
    monkeypatch.setattr(sys, "stderr", stream)
    x = torch.randn(8, 8)
    driver = PipelineDriver(
        pipeline(Chain(2), nn.MSELoss()), cluster, world_size=2, compile={"backend": waits}, check=False
    )
    driver.run(4, x, x)
    assert told == {0, 1}
    written = stream.getvalue()
    if not stream.isatty():
        assert written == ""
    else:
        assert "\rcompiling: worker0 0/2, worker1 0/2\x1b[K" in written and written.endswith("\r\x1b[K")
    driver.run(4, x, x)
    assert stream.getvalue() == written
