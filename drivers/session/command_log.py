"""The log of a cluster's commands: what was posted, who has answered, what ended how. It decides; it sends nothing.

Each event is a method: something is posted, answered, given up, or found to be lost. It changes the log, and returns the
actions that follow. The log reads no clock, knows no thread and has no socket: times and senders come with the events, and
`Session` does the actions, in their order. So any order of events can be tried without workers.

    posted ──▶ outstanding ──all answered──▶ `Accept` ──accepted──▶ done
                    │ a failure, Ctrl-C, a time limit, a lost worker
                    ▼
    given up: done, with an error. The calls that are not answered stay in ``unanswered``, and nothing is posted until they are

When a worker answers that it failed, the others may wait for values that will never come. So the command, and all that were
posted after it, are given up on all workers. A worker that goes on for too long with what was given up is lost. When a worker
is lost, the cluster is broken: nothing is told or awaited any more, until other processes are in the places of those that were
lost, or those are gone: a worker that is gone has no process, and nothing is sent to it until it has one again.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pippy.drivers.base.errors import ClusterError, StepError, WorkerLostError
from pippy.drivers.protocol.commands import Answer, Command, CommandElsewhere, GiveUp, NeedsPeers, ZeroGrad
from pippy.drivers.protocol.programs import ForgetPeers
from pippy.drivers.protocol.state import HoldState, Initialize, OptimizerStep, RestoreState, TakeKept, TakeState
from pippy.drivers.session.told import given_up_error, late_text, step_error, stuck_text
from pippy.ir.base.surroundings import Surroundings

_CHANGES = OptimizerStep, RestoreState, TakeState, TakeKept, Initialize, HoldState


def _nothing() -> None:
    pass


AcceptAnswers = Callable[[Mapping[int, Any]], None]


def accept_all(answers: Mapping[int, Any]) -> None:
    """Any answers will do."""


@dataclass(eq=False)
class PendingCommand:
    """A command: the body that each worker is sent, the calls that carry them, and the answers.

    ``accept`` is called with the values of the answers, and may raise: the command is given up then, as if a worker had
    failed. ``undo`` is called if it is given up, and ``limit`` is how many seconds it may take, from ``since`` on. The thread
    ``sender`` has posted it, for ``driver``. ``surroundings`` are given if they changed.
    """

    bodies: Mapping[int, Any]
    driver: int = -1
    zero_grad: ZeroGrad = False
    undo: Callable[[], None] = _nothing
    limit: float | None = None
    surroundings: Surroundings | None = None
    accept: AcceptAnswers = accept_all
    sender: Hashable = None
    number: int = 0
    since: float = 0.0
    late: bool = False
    done: bool = False
    error: Exception | None = None
    calls: dict[int, Any] = field(default_factory=dict)
    unclaimed: dict[int, Any] = field(default_factory=dict)  # the calls whose answers no thread is taking in, or has
    answers: dict[int, Answer] = field(default_factory=dict)
    dropped: dict[int, list[int]] = field(default_factory=dict)

    def unanswered(self) -> list[Any]:
        """The calls that are not answered."""
        return [call for worker, call in self.calls.items() if worker not in self.answers]

    def values(self) -> dict[int, Any]:
        """What the workers answered with, in the order in which they were told."""
        return {worker: self.answers[worker].value for worker in self.calls if worker in self.answers}

    def left(self, now: float) -> float | None:
        """How many seconds it may still take. None if there is no limit, or it is over and noted."""
        return None if self.limit is None or self.late else max(0.0, self.since + self.limit - now)


class Connect(NamedTuple):
    """Let a worker pass values to others."""

    worker: int
    peers: Collection[int]


class Send(NamedTuple):
    """Put a message into a worker's queue, and report the call with `CommandLog.sent`."""

    worker: int
    message: Command
    command: PendingCommand | None


class Tell(NamedTuple):
    """Send an urgent message, and report the call with `CommandLog.sent`."""

    worker: int
    message: GiveUp


class Told(NamedTuple):
    """Report that the workers are told, with `CommandLog.told`."""

    error: BaseException


class Accept(NamedTuple):
    """Have a command's answers accepted, and report it with `CommandLog.accepted` or `CommandLog.give_up`."""

    command: PendingCommand


class Undo(NamedTuple):
    """Undo what was noted when the command was posted."""

    command: PendingCommand


class Lose(NamedTuple):
    """Report a lost worker with `CommandLog.lose`, and raise the error."""

    worker: int
    how: str


class AskDump(NamedTuple):
    """Ask what the workers do, and report it with `CommandLog.dumped`."""

    command: PendingCommand


class AwaitGivenUp(NamedTuple):
    """Wait for what is in ``unanswered``, and report those that leave it there with `CommandLog.stuck`."""

    command: PendingCommand


Action = Connect | Send | Tell | Told | Accept | Undo | Lose | AskDump | AwaitGivenUp


class CommandLog:
    """The commands of one cluster, whose workers have these names.

    >>> log = CommandLog(["first", "second"])
    >>> command = PendingCommand({0: "a body", 1: "another"})
    >>> for worker, message, _ in log.post(command, now=0.0):
    ...     log.sent(worker, f"call {worker}", command)
    >>> log.answered(command, 1, Answer("one")), command.unanswered()
    ([], ['call 0'])
    >>> [type(action).__name__ for action in log.answered(command, 0, Answer("zero"))]
    ['Accept']
    >>> log.accepted(command, now=2.0)
    >>> command.done, command.values()
    (True, {0: 'zero', 1: 'one'})
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.number = self.settled = 0
        self.outstanding: deque[PendingCommand] = deque()
        self.unanswered: dict[Any, int] = {}  # the calls of what was given up, and their workers
        self.dropped: dict[int, list[int]] = {worker: [] for worker in range(len(names))}
        self.half_changed_drivers: set[int] = set()  # drivers that were changing what workers hold when one was lost
        self.untold: GiveUp | None = None  # what was given up when a worker was lost, and the others were not told of
        self.broken: str | None = None  # why the cluster cannot be used any more, once it cannot
        self.lost: str | None = None  # which worker, and how, once one is lost
        self.lost_error: WorkerLostError | None = None  # if that is why the cluster is broken
        self.to_replace: set[int] = set()  # those that are lost, until others are in their places
        self.starts = [0] * len(names)  # how often each worker has lost its process
        self.gone: frozenset[int] = frozenset()  # workers that were lost, and have no process
        self.turns: list[Hashable] = []  # the senders that want to send: the first one may

    @property
    def present(self) -> list[int]:
        """The workers that are not gone."""
        return [worker for worker in range(len(self.names)) if worker not in self.gone]

    # Whose turn it is

    def ask_turn(self, sender: Hashable) -> None:
        """A sender wants to be the only one that posts."""
        self.turns.append(sender)

    def has_turn(self, sender: Hashable) -> bool:
        """Whether it is."""
        return self.turns[:1] == [sender]

    def end_turn(self, sender: Hashable) -> None:
        """It wants that no more, or never got it."""
        if sender in self.turns:
            self.turns.remove(sender)

    def last_of_others(self, sender: Hashable, driver: int) -> PendingCommand | None:
        """The last command under way that another sender has posted for another driver: what fails takes all with it that
        was posted after it."""
        return next(
            (each for each in reversed(self.outstanding) if each.sender != sender and each.driver != driver), None
        )

    def has_sent_since(self, sender: Hashable, number: int) -> bool:
        """Whether a later command of a sender than the one with this number is under way."""
        return any(each.number > number and each.sender == sender for each in self.outstanding)

    # Commands

    def post(self, command: PendingCommand, now: float) -> list[Action]:
        """A command is to be sent, under the next number. It is not, and stays without one, while workers are yet to give up
        what they were told to: they would give up this one instead."""
        if self.unanswered:
            return []
        command.number = self.number = self.number + 1
        command.since = now
        self.outstanding.append(command)
        for worker in command.bodies:
            if self.dropped[worker]:
                command.dropped[worker], self.dropped[worker] = self.dropped[worker], []
        peers = [
            Connect(worker, body.peers(worker))
            for worker, body in command.bodies.items()
            if isinstance(body, NeedsPeers)
        ]
        return [*peers, *(Send(worker, self._message(command, worker), command) for worker in command.bodies)]

    def _message(self, command: PendingCommand, worker: int) -> Command:
        dropped, body = tuple(command.dropped.get(worker, ())), command.bodies[worker]
        parts = command.number, self.settled, command.driver, body, command.zero_grad, dropped
        return Command(*parts) if command.surroundings is None else CommandElsewhere(*parts, command.surroundings)

    def sent(self, worker: int, call: Any, command: PendingCommand | None = None) -> None:
        """A message is on its way, and this call will have the answer."""
        if command is None:
            self.unanswered[call] = worker
        else:
            command.calls[worker] = command.unclaimed[worker] = call

    def drop(self, driver: int, workers: Collection[int]) -> None:
        """A driver is gone: the next command of each of these workers says so."""
        for worker in workers:
            self.dropped[worker].append(driver)

    def answered(self, command: PendingCommand, worker: int, answer: Answer) -> list[Action]:
        """A worker has answered the oldest command. The first failure counts."""
        if command.done:  # it was given up meanwhile
            self.gave_up(command.calls[worker])
            return []
        command.answers[worker] = answer
        if answer.failure is None:
            return self.complete()
        name, peer = self.names[worker], answer.failure.peer
        if peer is not None:
            return [Lose(peer, f"worker {name!r} found the connection to it closed")]
        return self.give_up(step_error(name, worker, command.number, command.bodies[worker], answer.failure))

    def complete(self) -> list[Action]:
        """What follows if all workers have answered the oldest command."""
        oldest = self.outstanding[0]
        return [Accept(oldest)] if len(oldest.answers) == len(oldest.bodies) else []

    def accepted(self, command: PendingCommand, now: float) -> None:
        """The controller could use the answers: the command is done, and the time of the next one begins."""
        self.outstanding.popleft()
        command.done, self.settled = True, command.number
        if self.outstanding:
            self.outstanding[0].since = max(self.outstanding[0].since, now)

    # What is given up

    def give_up(self, error: BaseException) -> list[Action]:
        """Note that no command under way counts, because of an error. The workers are told, unless the cluster is broken."""
        if not self.outstanding:
            return []
        if self.broken:
            return self.told(error)
        message = GiveUp(self.outstanding[0].number, self.number)
        for command in self.outstanding:
            self.unanswered.update(
                (command.calls[worker], worker) for worker in command.calls.keys() - command.answers.keys()
            )
        return [*(Tell(worker, message) for worker in self.present), Told(error)]

    def told(self, error: BaseException) -> list[Action]:
        """All commands under way are done, with an error. If a worker was lost as it was told, they are already."""
        given_up = list(self.outstanding)
        if self.broken and given_up:
            self.untold = GiveUp(given_up[0].number, self.number)
            self.half_changed_drivers.update(each.driver for each in given_up if _changes_what_is_held(each))
        for command in given_up:
            command.error = given_up_error(command.number, given_up[0].number, error)
            command.done = True
            for worker, drivers in command.dropped.items():  # a worker that had not begun it has dropped nothing
                self.dropped[worker] += drivers
        self.outstanding.clear()
        return [Undo(command) for command in reversed(given_up)]

    def gave_up(self, call: Any) -> None:
        """A worker has answered a call of what was given up."""
        self.unanswered.pop(call, None)

    def timed_out(self, command: PendingCommand) -> list[Action]:
        """The oldest command takes longer than it may: it is given up when it is known what the workers do."""
        if command.done or command.late or not command.unanswered():
            return []
        command.late = True
        return [AskDump(command)]

    def dumped(self, command: PendingCommand, dump: str) -> list[Action]:
        """What the workers do while a command takes longer than it may."""
        error = StepError(late_text(command.number, command.limit, dump))
        return [] if command.done else [*self.give_up(error), AwaitGivenUp(command)]

    def stuck(self, doing: Mapping[int, str], seconds: float) -> list[Action]:
        """Some workers have not given up after so long, and this is what each does: they are lost, which ends what they do."""
        self.to_replace.update(doing)
        return [Lose(worker, stuck_text(what, seconds)) for worker, what in doing.items()]

    # What breaks

    def lose(self, worker: int, error: WorkerLostError) -> list[Action]:
        """A worker is lost: the cluster is broken."""
        self.to_replace.add(worker)
        self.lost = self.lost or str(error)
        self.lost_error = self.lost_error if self.broken else error
        self.breaks(f"this cluster lost a worker and cannot go on ({error})")
        return self.end(error)

    def breaks(self, why: str) -> None:
        """The cluster cannot be used any more, which all threads see at once. `end` says what follows."""
        self.broken = self.broken or why

    def end(self, error: ClusterError) -> list[Action]:
        """The cluster cannot be used any more: what is under way has failed, and nothing is waited for."""
        self.breaks(str(error))
        self.unanswered.clear()
        return self.told(error)

    def replace(self, workers: Collection[int], gone: Collection[int] = ()) -> list[Action]:
        """Other processes are in the places of workers, and workers that were lost are ``gone``: the others give up what they
        do, and forget all those."""
        for worker in (*workers, *gone):
            self.starts[worker] += 1
        self.gone = self.gone.union(gone).difference(workers)
        self.broken = self.lost = self.lost_error = None
        self.number += 1
        others = [worker for worker in self.present if worker not in workers]
        told = [] if self.untold is None else [Tell(worker, self.untold) for worker in others]
        forget = Command(self.number, self.settled, -1, ForgetPeers((*workers, *gone)))
        return [*told, *(Send(worker, forget, None) for worker in others)]

    def replaced(self) -> None:
        """Note that the lost workers were replaced, or are gone, and that all others have answered."""
        self.untold = None
        self.to_replace.clear()


def _changes_what_is_held(command: PendingCommand) -> bool:
    """Whether some workers may have done it, and others not, in a way that giving it up does not undo."""
    return any(isinstance(body, _CHANGES) for body in command.bodies.values())
