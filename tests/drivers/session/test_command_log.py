"""Any order of events in the log of commands, with workers that are a few lines each: no thread, no socket and no clock."""

from collections import deque
from contextlib import suppress
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pippy.drivers.base.errors import ClusterError, StepError, WorkerLostError
from pippy.drivers.protocol.commands import Answer, Command, Failure
from pippy.drivers.protocol.optimizers import OptimizerStep
from pippy.drivers.protocol.stages import ForgetPeers
from pippy.drivers.protocol.urgent import GiveUp
from pippy.drivers.session.command_log import (
    Accept,
    AskDump,
    AwaitGivenUp,
    CommandLog,
    EndProcesses,
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
        if failure is not None and command.number <= self.given_up_through:
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
        self.ended = False

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
            case AwaitGivenUp(command):
                self.await_given_up(command)
            case EndProcesses():
                self.ended = True
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

    def await_given_up(self, late: PendingCommand | None = None) -> None:
        """Wait for what was given up. If the workers are stuck, it is not."""
        if not self.is_stuck:
            self.work()
        self.do(self.log.stuck(set(self.log.unanswered.values()), 5.0, late))

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


AT_WORK = st.integers(0, WORKERS - 1)


@settings(max_examples=150, stateful_step_count=60)
class AnyOrder(RuleBasedStateMachine):
    """Three senders, each with a driver on two of the three workers, or on all of them."""

    PLACES = ((0, 1, 2), (0, 2), (1, 2))

    @initialize()
    def begin(self) -> None:
        self.cluster, self.log = (cluster := Cluster()), cluster.log
        self.drivers = [0, 1, 2]
        self.gone: list[int] = []
        self.posted: list[PendingCommand] = []
        self.outcomes: dict[PendingCommand, Any] = {}

    def starts(self, sender: int) -> list[int]:
        return [self.log.starts[worker] for worker in self.PLACES[sender]]

    @rule(sender=st.integers(0, 2), body=st.sampled_from([STEP, STEP, UPDATE]), ends=st.booleans())
    def post(self, sender: int, body: Any, ends: bool) -> None:
        if sender not in self.log.turns:
            self.log.ask_turn(sender)
        driver = self.drivers[sender]
        if self.log.broken or not self.log.has_turn(sender) or self.log.last_of_others(sender, driver) is not None:
            return
        command = self.cluster.post(driver, dict.fromkeys(self.PLACES[sender], body), sender, limit=1.0)
        if command.number:
            self.posted.append(command)
        else:
            assert self.log.unanswered
        if ends:
            self.log.end_turn(sender)

    @rule(sender=st.integers(0, 2))
    def end_turn(self, sender: int) -> None:
        self.log.end_turn(sender)

    @rule(at=AT_WORK)
    def worker_begins(self, at: int) -> None:
        worker = self.cluster.workers[at]
        if worker.queue and worker.running is None:
            worker.begin(self.cluster.answers)

    @rule(at=AT_WORK, how=st.sampled_from([None, None, FAILED, "peer"]))
    def worker_ends(self, at: int, how: Any) -> None:
        worker = self.cluster.workers[at]
        if worker.running is not None:
            dead = [peer for peer, each in enumerate(self.cluster.workers) if not each.alive]
            if how == "peer":
                how = Failure("PeerLost", "", peer=dead[0]) if dead else None
            if isinstance(worker.running[1].body, ForgetPeers):
                how = None
            worker.end(self.cluster.answers, how)

    @rule(at=AT_WORK)
    def worker_takes_what_is_urgent(self, at: int) -> None:
        if self.cluster.workers[at].urgent:
            self.cluster.workers[at].take_urgent(self.cluster.answers)

    @rule(which=st.integers(0, 8), refuses=st.sampled_from([False, False, False, True]))
    def hear(self, which: int, refuses: bool) -> None:
        if found := self.cluster.heard():
            self.cluster.refuses = refuses
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
        for each in others:
            assert f"step {each.number} was given up because step {first.number} failed:\nworker {worker}" in str(
                each.error
            )

    @rule()
    def ctrl_c(self) -> None:
        self.cluster.do(self.log.give_up(KeyboardInterrupt()))

    @rule(stuck=st.sampled_from([False, False, True]))
    @precondition(lambda self: self.log.outstanding)
    def takes_too_long(self, stuck: bool) -> None:
        self.cluster.is_stuck = stuck
        oldest = self.log.outstanding[0]
        self.cluster.do(self.log.timed_out(oldest))
        self.cluster.is_stuck = False
        assert oldest.done and (not self.cluster.ended or self.log.broken)

    @rule(at=AT_WORK)
    def worker_dies(self, at: int) -> None:
        if not self.cluster.ended:
            self.cluster.workers[at] = Worker()
            self.cluster.workers[at].alive = False

    @rule()
    def worker_is_missed(self) -> None:
        self.cluster.miss()

    @rule(finish=st.booleans())
    @precondition(lambda self: self.log.lost)
    def lost_are_replaced(self, finish: bool) -> None:
        self.cluster.replace(finish)

    @rule(sender=st.integers(0, 2))
    def driver_is_gone(self, sender: int) -> None:
        self.log.drop(self.drivers[sender], self.PLACES[sender])
        self.gone.append(self.drivers[sender])
        self.drivers[sender] += 3

    @invariant()
    def every_command_ends_once(self) -> None:
        ends = [*self.cluster.accepted, *self.cluster.undone]
        assert len(set(ends)) == len(ends)
        assert {each for each in self.posted if each.done} == set(ends) & set(self.posted)
        assert [each for each in self.posted if not each.done] == list(self.log.outstanding)
        for command in self.posted:
            if command.done:
                assert (command.error is None) == (command in self.cluster.accepted)
                if not isinstance(command.error, ClusterError):
                    assert self.outcomes.setdefault(command, str(command.error)) in str(command.error)

    @invariant()
    def no_gradient_of_a_step_that_has_not_succeeded_counts(self) -> None:
        succeeded = {each.number for each in self.cluster.accepted}
        for worker in self.cluster.workers:
            assert {step for steps in worker.counted.values() for step in steps} <= succeeded

    @invariant()
    def a_broken_cluster_waits_for_nothing_and_another_is_broken_by_nothing_but_a_loss(self) -> None:
        if self.log.broken:
            assert not self.log.outstanding and not self.log.unanswered
        assert bool(self.log.broken) == bool(self.log.lost or self.cluster.ended)

    @invariant()
    def the_drivers_that_were_at_an_update_when_a_worker_was_lost_are_half_changed(self) -> None:
        lost = [each for each in self.cluster.undone if isinstance(each.error, ClusterError)]
        assert self.log.half_changed_drivers == {each.driver for each in lost if UPDATE in each.bodies.values()}

    def teardown(self) -> None:
        """Without another fault all comes to its end: each sender gets its turn, and its steps count everywhere."""
        if self.cluster.ended:
            return
        for sender in [*self.log.turns]:
            assert self.log.has_turn(sender)
            self.log.end_turn(sender)
        self.settle()
        for sender in (0, 1, 2, 0, 1, 2):
            command = self.cluster.post(self.drivers[sender], dict.fromkeys(self.PLACES[sender], STEP), sender)
            self.settle()
            assert command in self.cluster.accepted
        for sender, driver in enumerate(self.drivers):
            for worker in self.PLACES[sender]:
                self.counts_all(self.cluster.workers[worker], driver)
        for each in self.cluster.workers:
            assert not {*each.counted} & {*self.gone}

    def settle(self) -> None:
        """All is heard, missed and replaced."""
        for _ in range(WORKERS + 1):
            self.cluster.work()
            if self.log.lost or any(not each.alive for each in self.cluster.workers):
                self.cluster.replace()
        assert not self.log.broken and not self.log.outstanding and not self.log.unanswered
        self.every_command_ends_once()

    def counts_all(self, worker: Worker, driver: int) -> None:
        """The steps of a driver that have succeeded since a worker is there have left their gradients."""
        steps = [
            each.number for each in self.cluster.accepted if each.driver == driver and STEP in each.bodies.values()
        ]
        steps = [each for each in steps if each > worker.born]
        assert [*worker.counted[driver], *worker.pending[driver]] == steps


TestAnyOrder = AnyOrder.TestCase
