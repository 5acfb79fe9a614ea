"""Any order of events in the log of commands, with workers that are a few lines each: no thread, no socket and no clock."""

from collections import deque
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.base.errors import ClusterError, StepError, WorkerLostError
from pippy.drivers.protocol.commands import Answer, Command, Failure, GiveUp
from pippy.drivers.protocol.programs import ForgetPeers
from pippy.drivers.protocol.state import OptimizerStep
from pippy.drivers.session.command_log import (
    Accept,
    AskDump,
    AwaitGivenUp,
    CommandLog,
    Lose,
    PendingCommand,
    Send,
    Tell,
    Told,
    Undo,
)

WORKERS, STEP, UPDATE = 3, "a step", OptimizerStep(0, None, False)
GIVEN_UP, FAILED = Failure("given up", ""), Failure("ArithmeticError: it failed", "", "the test")


class Gone(Exception):
    """A worker is not there, to which something was to be sent."""


class Worker:
    """Does commands in their order, and what is urgent at once, as `drivers/worker/worker.py` does. A step leaves a gradient.

    The gradients of each driver are ``pending`` until a later command says that the step has succeeded everywhere; then they
    are ``counted``.
    """

    def __init__(self, born: int = 0) -> None:
        self.alive, self.born = True, born
        self.queue: deque[tuple[Any, Command]] = deque()
        self.urgent: deque[tuple[Any, GiveUp]] = deque()
        self.running: tuple[Any, Command] | None = None
        self.given_up_through = -1
        self.to_clean_up: deque[GiveUp] = deque()
        self.pending: dict[int, list[int]] = {}
        self.counted: dict[int, list[int]] = {}

    def begin(self, answers: dict[Any, Any]) -> None:
        call, command = self.queue.popleft()
        while self.to_clean_up and self.to_clean_up[0].last < command.number:
            given_up = self.to_clean_up.popleft()
            for driver, steps in self.pending.items():
                self.pending[driver] = [each for each in steps if not given_up.first <= each <= given_up.last]
        if command.number <= self.given_up_through:
            answers[call] = Answer(failure=GIVEN_UP)
            return
        for driver in command.dropped:
            self.pending.pop(driver, None), self.counted.pop(driver, None)
        self.running = call, command
        if not isinstance(command.body, ForgetPeers):
            steps = self.pending.setdefault(command.driver, [])
            self.counted.setdefault(command.driver, []).extend(each for each in steps if each <= command.settled)
            self.pending[command.driver] = [each for each in steps if each > command.settled]

    def end(self, answers: dict[Any, Any], failure: Failure | None = None) -> None:
        assert self.running is not None
        (call, command), self.running = self.running, None
        if failure is not None and self.to_clean_up:  # a receive is interrupted, of whatever command it is
            failure = GIVEN_UP
        answers[call] = Answer(command.number, failure)
        if failure is None and command.body == STEP:
            self.pending[command.driver].append(command.number)

    def take_urgent(self, answers: dict[Any, Any]) -> None:
        call, message = self.urgent.popleft()
        self.to_clean_up.append(message)
        self.given_up_through = message.last
        answers[call] = None


class Cluster:
    """The log of three workers; what it says is to be done is done here, at once."""

    def __init__(self) -> None:
        self.log = CommandLog([f"worker{at}" for at in range(WORKERS)])
        self.workers = [Worker() for _ in range(WORKERS)]
        self.answers: dict[Any, Any] = {}
        self.calls = 0
        self.refuses = self.is_stuck = False
        self.accepted: list[PendingCommand] = []
        self.undone: list[PendingCommand] = []

    def post(
        self, driver: int, bodies: dict[int, Any], sender: Any = None, limit: float | None = None
    ) -> PendingCommand:
        command = PendingCommand(bodies, driver, limit=limit, sender=sender)
        self.do(self.log.post(command, now=0.0))
        return command

    def do(self, actions: Any) -> None:
        """Do them, up to one that finds a worker gone."""
        with suppress(Gone):
            for action in actions:
                self.do_one(action)

    def do_one(self, action: Any) -> None:
        match action:
            case Send(worker, message, command):
                self.log.sent(worker, self.call(self.workers[worker].queue, worker, message), command)
            case Tell(worker, message):
                self.log.sent(worker, self.call(self.workers[worker].urgent, worker, message))
            case Told(error):
                self.do(self.log.told(error))
            case Accept(command) if self.refuses:
                self.do(self.log.give_up(ValueError("no loss")))
            case Accept(command):
                self.accepted.append(command)
                self.log.accepted(command, now=1.0)
            case Undo(command):
                self.undone.append(command)
            case Lose(worker):
                self.lose(worker)
            case AskDump(command):
                self.do(self.log.dumped(command, "a dump"))
            case AwaitGivenUp():
                self.await_given_up()
            case _:
                raise AssertionError(action)

    def call(self, queue: Any, worker: int, message: Any) -> Any:
        if not self.workers[worker].alive:
            self.lose(worker)
            raise Gone
        self.calls += 1
        queue.append((self.calls, message))
        return self.calls

    def lose(self, worker: int) -> None:
        self.workers[worker] = Worker()
        self.workers[worker].alive = False
        self.do(self.log.lose(worker, WorkerLostError(f"worker{worker}", worker, "here", 1, "it died")))

    def await_given_up(self) -> None:
        """Wait for what was given up. If the workers are stuck, it is not."""
        if not self.is_stuck:
            self.work()
        self.do(self.log.stuck(dict.fromkeys(self.log.unanswered.values(), "F1.1"), 5.0))

    def awaited(self) -> list[tuple[PendingCommand | None, int, Any]]:
        """The calls that a wait is for: those of the oldest command, and of what was given up."""
        calls: list[tuple[PendingCommand | None, int, Any]] = [
            (None, at, each) for each, at in self.log.unanswered.items()
        ]
        for command in [*self.log.outstanding][:1]:
            calls += [(command, at, each) for at, each in command.calls.items() if at not in command.answers]
        return calls

    def heard(self) -> list[tuple[PendingCommand | None, int, Any]]:
        """Those that are answered."""
        return [each for each in self.awaited() if each[2] in self.answers]

    def hear(self, command: PendingCommand | None, worker: int, call: Any) -> None:
        answer = self.answers.pop(call)
        if command is None:
            self.log.gave_up(call)
        else:
            assert answer.failure is not GIVEN_UP, "the worker has given up what was not given up"
            self.do(self.log.answered(command, worker, answer))

    def work(self) -> None:
        """The workers do all that they have; what is answered is heard; and who is not there is missed."""
        going_on = True
        while going_on:
            going_on = False
            for worker in self.workers:
                if worker.urgent:
                    worker.take_urgent(self.answers)
                elif worker.running:
                    worker.end(self.answers)
                elif worker.queue:
                    worker.begin(self.answers)
                else:
                    continue
                going_on = True
            if found := self.heard():
                self.hear(*found[0])
                going_on = True
        self.miss()

    def miss(self) -> None:
        """A wait for a worker that is not there finds it lost."""
        missed = [worker for _, worker, _ in self.awaited() if not self.workers[worker].alive]
        if missed:
            self.lose(missed[0])

    def replace(self, finish: bool = True) -> None:
        """Other workers are in the places of those that are lost."""
        lost = sorted({at for at, each in enumerate(self.workers) if not each.alive})
        for worker in lost:
            self.workers[worker] = Worker(self.log.number)
        self.do(self.log.replace(lost))
        if finish:
            self.work()
        if self.log.unanswered:
            self.lose(lost[0])
        else:
            self.log.replaced()


def posted(log: CommandLog, bodies: dict[int, Any], now: float = 0.0, **options: Any) -> PendingCommand:
    """A command whose calls are named after the worker and its number."""
    command = PendingCommand(bodies, **options)
    for action in log.post(command, now):
        assert isinstance(action, Send)
        log.sent(action.worker, f"{action.worker}.{command.number}", command)
    return command


def give_up(log: CommandLog, error: BaseException) -> list[int]:
    """The workers that are told."""
    told = [action.worker for action in log.give_up(error) if isinstance(action, Tell)]
    for worker in told:
        log.sent(worker, f"{worker} gives up")
    log.told(error)
    return told


@pytest.fixture
def log() -> CommandLog:
    return CommandLog(["first", "second", "third"])


def test_nothing_is_posted_until_all_have_given_up_and_have_ended_what_they_did(log):
    """A worker that has heard of it may still be at an instruction; so it is found if that does not end."""
    posted(log, {0: STEP})
    assert give_up(log, KeyboardInterrupt()) == [0, 1, 2], "also those that have no part in it: later commands had"
    owed = ["0 gives up", "1 gives up", "2 gives up", "0.1"]
    for call in owed:
        assert posted(log, {1: STEP}).number == 0
        log.gave_up(call)
    assert posted(log, {1: STEP}).number == 2


def test_the_time_of_a_step_begins_when_the_one_before_it_is_done(log):
    first, second = posted(log, {0: STEP}, now=0.0, limit=5.0), posted(log, {0: STEP}, now=1.0, limit=5.0)
    assert (first.left(4.0), second.left(4.0)) == (1.0, 2.0)
    log.answered(first, 0, Answer())
    log.accepted(first, now=4.0)
    assert second.left(4.0) == 5.0


def test_a_time_limit_is_noted_once_and_not_when_all_is_answered(log):
    late, answered = posted(log, {0: STEP}, limit=5.0), posted(log, {0: STEP}, limit=5.0)
    assert log.timed_out(late) == [AskDump(late)]
    assert log.timed_out(late) == [] and late.left(9.0) is None
    answered.answers[0] = Answer()
    assert log.timed_out(answered) == []


def test_what_a_thread_waits_for_before_it_sends(log):
    """A step of one driver that fails takes all with it that was sent after it, and so none of another driver's."""
    first = posted(log, {0: STEP}, driver=1, sender="a thread")
    assert log.last_of_others("another", driver=2) is first
    assert log.last_of_others("a thread", driver=2) is None and log.last_of_others("another", driver=1) is None


def test_an_answer_that_comes_after_its_command_was_given_up(log):
    """Another thread had given it up. So it does not count, and the worker owes it no more."""
    command = posted(log, {0: STEP})
    give_up(log, KeyboardInterrupt())
    assert "0.1" in log.unanswered
    assert log.answered(command, 0, Answer("too late")) == []
    assert "0.1" not in log.unanswered and not command.answers


def test_a_worker_that_misses_another_says_which_is_lost(log):
    command = posted(log, {0: STEP, 1: STEP})
    how = "worker 'first' found the connection to it closed"
    assert log.answered(command, 0, Answer(failure=Failure("PeerLost", "", peer=1))) == [Lose(1, how)]


def test_a_worker_is_lost_as_it_is_told_to_give_up(log):
    """So that is the error, and not the failure that came of it."""
    first, second = posted(log, {0: OptimizerStep(0, None, False)}, driver=4), posted(log, {1: STEP}, driver=5)
    actions = log.answered(first, 0, Answer(failure=FAILED))
    lost = WorkerLostError("second", 1, "here", 1, "it died")
    assert log.lose(1, lost) == [Undo(second), Undo(first)]
    assert isinstance(actions[-1], Told) and log.told(actions[-1].error) == []
    assert first.error is lost and second.error is lost
    assert log.untold == GiveUp(1, 2) and log.half_changed_drivers == {4}
    another = WorkerLostError("third", 2, "here", 1, "it was killed")
    assert log.lose(2, another) == []
    assert log.to_replace == {1, 2} and log.lost_error is lost and "it died" in str(log.broken)


def test_replaced_workers_begin_anew_and_the_others_are_told_what_they_were_not(log):
    posted(log, {0: STEP, 1: STEP})
    log.lose(1, WorkerLostError("second", 1, "here", 1, "it died"))
    told = [(each.worker, each.message) for each in log.replace([1]) if isinstance(each, Tell)]
    assert told == [(0, GiveUp(1, 1)), (2, GiveUp(1, 1))] and log.broken is None and log.starts == [0, 1, 0]
    log.replaced()
    assert not log.to_replace
    log.lose(2, WorkerLostError("third", 2, "here", 1, "it died"))
    assert [each.worker for each in log.replace([2]) if isinstance(each, Tell)] == [], "they were told"


def test_nothing_is_told_to_a_worker_that_is_gone_until_it_has_a_process_again(log):
    posted(log, {0: STEP, 1: STEP})
    log.lose(1, WorkerLostError("second", 1, "here", 1, "it died"))
    told = log.replace([], gone=[1])
    kinds = [(each.worker, type(each.message)) for each in told]
    assert kinds == [(0, GiveUp), (2, GiveUp), (0, Command), (2, Command)]
    assert told[-1].message.body == ForgetPeers((1,)) and log.present == [0, 2] and log.starts == [0, 1, 0]
    log.replaced()
    posted(log, {0: STEP})
    assert [each.worker for each in log.give_up(StepError("why")) if isinstance(each, Tell)] == [0, 2]
    log.told(StepError("why"))
    log.lose(2, WorkerLostError("third", 2, "here", 1, "it died"))
    assert {each.worker for each in log.replace([1, 2]) if isinstance(each, Send)} == {0}
    assert log.present == [0, 1, 2] and log.starts == [0, 2, 1]


def test_a_driver_that_is_gone_is_named_again_if_the_command_that_named_it_was_given_up(log):
    """A worker that had not begun that command kept the driver's stages for ever."""
    log.drop(7, (0,))
    (send,) = log.post(command := PendingCommand({0: STEP}), 0.0)
    assert send.message.dropped == (7,)
    log.sent(0, "a call", command)
    give_up(log, KeyboardInterrupt())
    for call in list(log.unanswered):
        log.gave_up(call)
    (send,) = log.post(PendingCommand({0: STEP}), 0.0)
    assert send.message.dropped == (7,)


class AnyOrder:
    """Three senders, each with a driver on some of the workers. Events have a number, which says of whom or what they are."""

    PLACES = ((0, 1, 2), (0, 2), (1, 2))

    def __init__(self) -> None:
        self.cluster, self.log = (cluster := Cluster()), cluster.log
        self.drivers = [0, 1, 2]
        self.gone: list[int] = []
        self.posted: list[PendingCommand] = []
        self.texts: dict[PendingCommand, str] = {}

    def post(self, which: int) -> None:
        sender, body = which % 3, UPDATE if which >= 9 else STEP
        if sender not in self.log.turns:
            self.log.ask_turn(sender)
        others = self.log.last_of_others(sender, self.drivers[sender])
        if self.log.broken or not self.log.has_turn(sender) or others is not None:
            return
        bodies = dict.fromkeys(self.PLACES[sender][which in (4, 5) :], body)
        command = self.cluster.post(self.drivers[sender], bodies, sender, limit=1.0)
        if command.number:
            self.posted.append(command)
        if which % 4:
            self.log.end_turn(sender)

    def end_turn(self, which: int) -> None:
        self.log.end_turn(which % 3)

    def worker_begins(self, which: int) -> None:
        worker = self.cluster.workers[which % 3]
        if worker.queue and worker.running is None:
            worker.begin(self.cluster.answers)

    def worker_ends(self, which: int, failure: Failure | None = None) -> None:
        worker = self.cluster.workers[which % 3]
        if worker.running is not None and not (failure and isinstance(worker.running[1].body, ForgetPeers)):
            worker.end(self.cluster.answers, failure)

    def worker_fails(self, which: int) -> None:
        self.worker_ends(which, FAILED)

    def worker_misses_another(self, which: int) -> None:
        for peer, other in enumerate(self.cluster.workers):
            if not other.alive:
                self.worker_ends(which, Failure("PeerLost", "", peer=peer))

    def worker_takes_what_is_urgent(self, which: int) -> None:
        if self.cluster.workers[which % 3].urgent:
            self.cluster.workers[which % 3].take_urgent(self.cluster.answers)

    def hear(self, which: int) -> None:
        if found := self.cluster.heard():
            self.cluster.refuses = which == 11
            under_way, (command, worker, call) = list(self.log.outstanding), found[which % len(found)]
            failure = command and self.cluster.answers[call].failure
            self.cluster.hear(command, worker, call)
            self.cluster.refuses = False
            if failure and not self.log.broken:
                self.is_named(under_way, worker)

    def is_named(self, given_up: list[PendingCommand], worker: int) -> None:
        """The error of each command says which has failed first, and where."""
        first, *others = given_up
        assert isinstance(first.error, StepError) and first.error.worker == worker
        said = f"was given up because step {first.number} failed:\nworker {worker}"
        assert all(f"step {each.number} {said}" in str(each.error) for each in others)

    def ctrl_c(self, which: int) -> None:
        self.cluster.do(self.log.give_up(KeyboardInterrupt()))

    def take_too_long(self, which: int) -> None:
        self.cluster.is_stuck = which >= 10
        for oldest in [*self.log.outstanding][:1]:
            if oldest.unanswered():
                self.cluster.do(self.log.timed_out(oldest))
                assert oldest.done
                assert "longer than 1 s" in str(oldest.error) or self.log.lost
        self.cluster.is_stuck = False

    def worker_dies(self, which: int) -> None:
        self.cluster.workers[which % 3] = Worker()
        self.cluster.workers[which % 3].alive = False

    def miss(self, which: int) -> None:
        self.cluster.miss()

    def replace(self, which: int) -> None:
        if self.log.lost:
            self.cluster.replace(finish=which > 3)

    def driver_is_gone(self, which: int) -> None:
        sender = which % 3
        self.log.drop(self.drivers[sender], self.PLACES[sender])
        self.gone.append(self.drivers[sender])
        self.drivers[sender] += 3

    def check(self) -> None:
        """What holds at any time."""
        log, accepted, undone = self.log, self.cluster.accepted, self.cluster.undone
        # Each command ends once: it succeeds, or is undone and has an error, which stays.
        ends = [*accepted, *undone]
        assert len({*ends}) == len(ends) and {each for each in self.posted if each.done} == {*ends} & {*self.posted}
        assert [each for each in self.posted if not each.done] == [*log.outstanding]
        assert all(each.error is None and len(each.answers) == len(each.bodies) for each in accepted)
        assert all(str(each.error).startswith(self.texts.setdefault(each, str(each.error))) for each in undone)
        # No gradient counts of a step that has not succeeded.
        counted = {step for each in self.cluster.workers for steps in each.counted.values() for step in steps}
        assert counted <= {each.number for each in accepted}
        # What is under way is of one sender, so that none fails with what another has sent.
        assert len({each.sender for each in log.outstanding}) <= 1
        # Only what is lost or stuck breaks a cluster; then nothing is waited for.
        assert bool(log.broken) == bool(log.lost)
        assert not log.broken or not (log.outstanding or log.unanswered)
        # Half changed are the drivers, and only those, that were at an update when a worker was lost.
        lost = [each for each in undone if isinstance(each.error, ClusterError)]
        assert log.half_changed_drivers == {each.driver for each in lost if UPDATE in each.bodies.values()}

    def end(self) -> None:
        """Without another fault all comes to its end: each sender gets its turn, and its steps count everywhere."""
        for sender in [*self.log.turns]:
            assert self.log.has_turn(sender)
            self.log.end_turn(sender)
        assert not self.log.turns
        self.settle()
        for sender in (0, 1, 2, 0, 1, 2):
            command = self.cluster.post(self.drivers[sender], dict.fromkeys(self.PLACES[sender], STEP), sender)
            self.settle()
            assert command in self.cluster.accepted
        for sender, driver in enumerate(self.drivers):
            for worker in self.PLACES[sender]:
                self.counts_all(worker, driver)
        for each in self.cluster.workers:
            assert not {*each.counted} & {*self.gone}

    def settle(self) -> None:
        """All is heard, missed and replaced."""
        for _ in range(WORKERS + 1):
            self.cluster.work()
            if self.log.lost or any(not each.alive for each in self.cluster.workers):
                self.cluster.replace()
        assert not self.log.broken and not self.log.outstanding and not self.log.unanswered
        self.check()

    def counts_all(self, at: int, driver: int) -> None:
        """The steps of a driver that have succeeded since a worker is there have left their gradients."""
        worker = self.cluster.workers[at]
        steps = [each.number for each in self.cluster.accepted if each.driver == driver and each.bodies.get(at) == STEP]
        left = [*worker.counted[driver], *worker.pending[driver]]
        assert left == [each for each in steps if each > worker.born]


HOW_OFTEN = {
    AnyOrder.post: 8,
    AnyOrder.end_turn: 3,
    AnyOrder.worker_begins: 12,
    AnyOrder.worker_ends: 12,
    AnyOrder.worker_takes_what_is_urgent: 6,
    AnyOrder.hear: 16,
    AnyOrder.worker_fails: 2,
    AnyOrder.worker_misses_another: 2,
    AnyOrder.ctrl_c: 2,
    AnyOrder.take_too_long: 1,
    AnyOrder.worker_dies: 1,
    AnyOrder.miss: 2,
    AnyOrder.replace: 3,
    AnyOrder.driver_is_gone: 1,
}
EVENTS = st.sampled_from([event for event, often in HOW_OFTEN.items() for _ in range(often)])


@settings(max_examples=300)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 11)), min_size=50, max_size=120))
def test_any_order_of_events(events: list[tuple[Any, int]]) -> None:
    """Nothing waits for ever, each command ends once, what failed first is named, and a failed step leaves no gradients."""
    order = AnyOrder()
    for event, which in events:
        event(order, which)
        order.check()
    order.end()
