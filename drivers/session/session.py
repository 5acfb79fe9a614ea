"""What the controller says to the workers of one cluster, and hears from them: messages, answers, signs of life.

    a driver's thread ──in_turn──▶ post ──▶ CommandLog ──actions──▶ messages to the workers
                                    ▲ events                          │
                                    └── answers, lost workers, time ◀─┘

What follows from an event is decided in `CommandLog`; here it is done. ``lock`` guards the log and the links.
"""

import copy
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from pippy.drivers.base.errors import RECOVERY_ADVICE, ClusterError, WorkerLostError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.base.process_signs import Look, Sign, said_of
from pippy.drivers.protocol.commands import AskWays, ComeIn, Connect, Dump, News, Ping
from pippy.drivers.session import command_log as actions
from pippy.drivers.session.calls import (
    Address,
    CallWait,
    Messages,
    PendingCall,
    answer_to,
    last_line,
    outcome,
    succeeds,
)
from pippy.drivers.session.command_log import CommandLog, PendingCommand
from pippy.drivers.session.told import CompileProgress, log_for_worker
from pippy.drivers.wire.messages.controller_messages import ControllerConnections
from pippy.drivers.wire.pickling import pickle_message
from pippy.drivers.wire.pollable_event import PollableEvent

Returned = TypeVar("Returned")
_log = logging.getLogger(__name__)
_of_this_process = weakref.WeakSet["Session"]()


class Session:
    """The exchange with the workers of one cluster. Any thread may call this. ``counts`` has how many messages each was sent.

    Nothing is sent but what is asked for. Only a wait that lasts longer than ``interval`` seconds pings those that it waits
    for; a worker that leaves a ping unanswered for ``timeout`` seconds is lost, unless its process is on this host and makes
    progress. So a worker that was killed is noticed within milliseconds, and one that is stopped, or out of reach, within
    ``interval + timeout``.

    ``deaths`` returns the workers that the operating system says have died, and how. ``messages`` carries all that is sent.
    The error for a lost worker ends with ``recovery_advice``.
    """

    def __init__(
        self,
        workers: Iterable[Address],
        timeout: float = 5.0,
        interval: float = 1.0,
        deaths: Callable[[float], Mapping[int, str]] = lambda wait: {},
        messages: Messages | None = None,
        recovery_advice: str = RECOVERY_ADVICE,
    ) -> None:
        self.workers = tuple(workers)
        self.timeout, self.interval = timeout, interval
        self.counts = [0] * len(self.workers)
        self.log = CommandLog([worker.name for worker in self.workers])
        self.lock = threading.RLock()
        self.recovery_advice = recovery_advice
        self.messages = messages or ControllerConnections()
        self._deaths = deaths
        self._waits: set[weakref.ref[CallWait]] = set()  # of all threads; one that Ctrl-C has left is soon gone
        self.compiling = CompileProgress([worker.name for worker in self.workers])
        self._heard = [time.monotonic()] * len(self.workers)
        self._reports: deque[tuple[int, int, str]] = deque()
        self._gone: deque[tuple[int, tuple[int, ...]]] = deque()
        self._connected: set[tuple[int, int]] = set()
        _of_this_process.add(self)

    @property
    def broken(self) -> str | None:
        """Why the cluster cannot be used any more, once it cannot: then all waits end, in all threads."""
        return self.log.broken

    # Messages

    def send(self, worker: int, message: Any) -> PendingCall:
        """Put a message into a worker's queue. The call is answered when the worker's main thread replies."""
        self.check()
        pickled = pickle_message(message)
        with self.lock:  # the numbers must have no holes: one is used only by a message that is on its way
            number = self.counts[worker]
            future = self._start(worker, lambda: self.messages.post(worker, number, pickled))
            self.counts[worker] += 1
            self._heard[worker] = time.monotonic()  # before it the worker had nothing to say
        return PendingCall(worker, type(message).__name__, future)

    def urgent(self, worker: int, message: Any) -> PendingCall:
        """Ask a worker something that it answers even while it computes."""
        self.check()
        return self._urgent(worker, message)

    def ping(self, worker: int) -> PendingCall:
        """Ask whether a worker lives."""
        return self._urgent(worker, Ping())

    def heard(self, worker: int, told: News | None) -> None:
        """Take what a worker has told, with an answer to a ping or a command."""
        self._heard[worker] = time.monotonic()
        self.compiling.show(worker, None if told is None else told.compiling)
        if told is not None and told.records:
            log_for_worker(self.workers[worker].name, self.workers[worker].pid, told.records)

    def _urgent(self, worker: int, message: Any) -> PendingCall:
        pickled = pickle_message(message)
        future = self._start(worker, lambda: self.messages.urgent(worker, pickled))
        return PendingCall(worker, type(message).__name__, future)

    def _start(self, worker: int, call: Callable[[], Any]) -> Any:
        """Make a call. For a worker that is known to be gone it fails at once."""
        if worker in self.log.gone:
            raise ClusterError(f"worker {self.workers[worker].name!r} was lost, and has no process")
        try:
            return call()
        except ConnectionError as error:
            self.check()
            raise self.mark_lost(worker, f"the connection to it broke: {last_line(error)}") from None

    def connect(self, worker: int, peers: Iterable[int]) -> None:
        """Let a worker pass values to others, and take theirs. What connects them is made once, for those that need it."""
        for peer in peers:
            pair = min(worker, peer), max(worker, peer)
            if pair not in self._connected:
                with uninterrupted():
                    first = self.messages.connect(*pair)
                    if first is None:
                        self._connected.add(pair)
                if first is not None:
                    near = self.workers[pair[0]].memory == self.workers[pair[1]].memory
                    invitation = self.answer(self.urgent(first, Connect(*pair, near)))
                    self.answer(self.urgent(pair[1], ComeIn(first, invitation)))
                    self._connected.add(pair)

    def answer(self, call: PendingCall) -> Any:
        """The answer of one call, when it comes."""
        (done,) = self.completed([call])
        return done.answer

    def completed(
        self, calls: Iterable[PendingCall], timeout: float | None = None, over: Callable[[], bool] | None = None
    ) -> Iterator[PendingCall]:
        """Yield each call when it is answered; raise WorkerLostError if its worker is lost.

        Ctrl-C interrupts the wait and breaks nothing: the calls go on, and can be waited for again. With a ``timeout`` the
        iteration just ends that many seconds after it began. It ends when it is ``over``; else when all are answered.
        """
        self.check()
        with self._waiting(calls, timeout, over) as wait:
            while (call := wait.next()) is not None:
                _, error = outcome(call.future.value)
                if error is not None:
                    self._explain(call, error)
                yield call

    @contextmanager
    def _waiting(
        self, calls: Iterable[PendingCall], timeout: float | None, over: Callable[[], bool] | None
    ) -> Iterator[CallWait]:
        """A wait, which is closed in any case: also if Ctrl-C comes as it begins."""
        wait = None
        try:
            with uninterrupted():
                wait = CallWait(self, calls, timeout, over)
                self._waits.add(own := weakref.ref(wait, self._waits.discard))
            yield wait
        finally:
            if wait is not None:
                self._waits.discard(own)
                wait.close()
                self.compiling.end()

    @contextmanager
    def patient(self, timeout: float) -> Iterator[None]:
        """Inside, a worker may leave a ping unanswered for ``timeout`` seconds: for what does not let its Python run."""
        before, self.timeout = self.timeout, max(self.timeout, timeout)
        try:
            yield
        finally:
            self.timeout = before

    def _wake(self) -> None:
        """Have the waits of all threads see what has changed."""
        for each in self._waits.copy():
            if (wait := each()) is not None:
                wait.wakeup.set()

    # Commands

    def in_turn(self, do: Callable[[], Returned], driver: int | None = None) -> Returned:
        """Call a function while no other thread sends commands. For a driver it first waits for what other threads have under
        way for other drivers, because what fails takes all with it that was sent after it."""
        thread = threading.get_ident()
        if self.log.has_turn(thread):
            return do()
        try:
            self.log.ask_turn(thread)
            if not self.log.has_turn(thread):
                with self._waiting((), None, lambda: self.log.has_turn(thread)) as wait:
                    wait.sleep()
            if driver is not None:
                with self.lock:
                    last = self.log.last_of_others(thread, driver)
                if last is not None:
                    self._await_done(last)  # its errors are raised there
            result = do()
        finally:
            try:
                self._end_turn(thread)
            finally:  # Ctrl-C may have come just before
                self._end_turn(thread)
        return result

    def _end_turn(self, thread: int) -> None:
        self.log.end_turn(thread)
        self._wake()

    def drop(self, driver: int, workers: tuple[int, ...]) -> None:
        """Have workers drop what belongs to a driver: the next command says so. Takes no lock, for it ends an object."""
        self._gone.append((driver, workers))

    def post(self, command: PendingCommand) -> PendingCommand:
        """Send each worker its part of a command, when all have given up what they were told to."""
        command.sender = threading.get_ident()
        try:
            while not command.number:
                self.wait_given_up()
                with uninterrupted(), self.lock:
                    self.check()
                    while self._gone:
                        self.log.drop(*self._gone.popleft())
                    self._do(self.log.post(command, time.monotonic()))
        except BaseException as error:  # some workers may have the command, and wait for the others
            if command.number:
                self.give_up(error)
            raise
        return command

    def wait(self, command: PendingCommand) -> dict[int, Any]:
        """The values that the workers answered with. Commands that were posted before are waited for too."""
        self._await_done(command)
        with self.lock:  # what was noted for it is undone
            if command.error is not None:
                raise command.error
        return command.values()

    def call(self, command: PendingCommand) -> dict[int, Any]:
        """Post a command, and wait for it."""
        try:
            return self.wait(self.post(command))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or (command.number and not command.done):  # between the two
                self.give_up(error)
            raise

    def wait_all(self) -> None:
        """Wait for all that was sent; raises if the last of it failed."""
        with self.lock:
            last = self.log.outstanding[-1] if self.log.outstanding else None
        if last is not None:
            self.wait(last)

    def has_sent_since(self, number: int) -> bool:
        """Whether a later command of this thread than the one with this number is under way."""
        with self.lock:
            return self.log.has_sent_since(threading.get_ident(), number)

    def give_up(self, error: BaseException) -> None:
        """Give up all that is under way, because of an error. The workers are told, unless the cluster is broken."""
        with uninterrupted(), self.lock, suppress(ClusterError):  # a worker that is lost as it is told ends all, too
            self._do(self.log.give_up(error))

    def wait_given_up(self) -> None:
        """Wait until the workers have given up what they were told to. One that has not after ``timeout`` seconds is lost."""
        if self.log.unanswered:
            calls = list(self.log.unanswered)
            for call in self.completed(calls, self.timeout):
                with self.lock:
                    self.log.gave_up(call)
            stuck = {call.worker for call in calls if call in self.log.unanswered}
            said = self._doing(stuck)
            with uninterrupted(), self.lock:
                self._do(self.log.stuck({worker: said[worker] for worker in stuck}, self.timeout))
            self.check()

    def _await_done(self, command: PendingCommand) -> None:
        try:
            while not command.done:
                self._take_answers()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or not command.done:  # while another thread takes in answers
                self.give_up(error)
            raise

    def _take_answers(self) -> None:
        """Wait for the oldest command. Where several threads do, each answer is taken in by the first that claims it."""
        with self.lock:
            if not self.log.outstanding:
                return
            oldest = self.log.outstanding[0]
            calls, left = [*oldest.unclaimed.values()], oldest.left(time.monotonic())
            if not oldest.bodies:
                self._do(self.log.complete())
        for call in self.completed(calls, left, lambda: oldest.done):
            if oldest.unclaimed.pop(call.worker, None) is not None:
                answer = answer_to(call)
                self.heard(call.worker, getattr(answer, "told", None))
                with self.lock:
                    self._do(self.log.answered(oldest, call.worker, answer))
        if not oldest.done:
            with self.lock:
                self._do(self.log.timed_out(oldest))

    def _do(self, follows: Iterable[actions.Action]) -> None:
        """Do what follows from an event."""
        for action in follows:
            match action:
                case actions.Send(worker, message, command):
                    self.log.sent(worker, self.send(worker, message), command)
                case actions.Accept(command):
                    self._accept(command)
                case actions.Connect(worker, peers):
                    self.connect(worker, peers)
                case actions.Tell(worker, message):
                    self.log.sent(worker, self.urgent(worker, message))
                case actions.Told(error):
                    with uninterrupted():
                        self._do(self.log.told(error))
                        self._wake()
                case actions.Undo(command):
                    command.undo()
                case actions.Lose(worker, how):
                    raise self.mark_lost(worker, how)
                case actions.AskDump(command):
                    self._do(self.log.dumped(command, self.dump()))
                case actions.AwaitGivenUp(command):
                    try:
                        self.wait_given_up()
                    except ClusterError as lost:  # that is why it took so long
                        lost.__cause__, command.error = command.error, lost

    def _accept(self, command: PendingCommand) -> None:
        """See whether the controller can use the answers. If not, the command has failed, and nothing of it counts."""
        try:
            command.accept(command.values())
        except BaseException as error:
            self.give_up(error)
            if not isinstance(error, Exception):
                raise
            return
        with uninterrupted():
            self.log.accepted(command, time.monotonic())
            self._wake()

    # What the workers do

    def dump(self, timeout: float = 1.0) -> str:
        """What every worker does or waits for, and which workers do not answer in time."""
        try:
            doing = self._doing(range(len(self.workers)), timeout)
        except ClusterError as error:
            return str(error)
        return "\n".join(f"{self.workers[worker].name!r}: {what}" for worker, what in doing.items())

    def _doing(self, workers: Iterable[int], timeout: float = 1.0) -> dict[int, str]:
        """What some workers do or wait for, as they say themselves."""
        doing = self._ask(Dump(), [worker for worker in workers if worker not in self.log.gone], timeout)
        doing |= dict.fromkeys(self.log.gone, "it was lost, and has no process")
        for worker in set(workers) - doing.keys():
            what = self._said_of(worker) or "it is stopped, or its process does not let Python run"
            doing[worker] = f"no answer within {timeout:g} s: {what}"
        return {worker: doing[worker] for worker in workers}

    def _said_of(self, worker: int, since: Sign | None = None) -> str:
        """What the system of a worker's host says of it, or nothing. ``since`` is when the worker last made progress."""
        address = self.workers[worker]
        look = Look.at(address.pid) if address.is_here else self.messages.signs.look(worker)
        if look is None:
            return ""
        look = replace(look, before=since or look.before)
        return said_of(look, address.pid, time.monotonic() - self._heard[worker])

    def sign(self, worker: int) -> Sign | None:
        """What the process of a worker has done, as far as the system of its host can be asked."""
        address = self.workers[worker]
        return Sign.of(address.pid) if address.is_here else self.messages.signs.sign(worker)

    def ways(self, timeout: float = 1.0) -> dict[tuple[int, int], str]:
        """From which worker to which values stay on devices, and from which to which they do not, with the reason."""
        try:
            said = self._ask(AskWays(), self.log.present, timeout)
        except ClusterError:
            return {}
        return {(one, other): why for one, ways in said.items() for other, why in ways.items()}

    def _ask(self, message: Any, workers: Iterable[int], timeout: float) -> dict[int, Any]:
        """What the workers that answer in time say at once."""
        calls = [self.urgent(worker, message) for worker in workers]
        return {call.worker: call.answer for call in self.completed(calls, timeout)}

    # Who is alive

    def check(self) -> None:
        """Raise if the cluster is broken or closed, or a worker has reported that it lost another. For a lost worker that is a
        `WorkerLostError` as long as it is not replaced: any thread may be the first to find it."""
        if self.log.lost_error is not None:
            error = copy.copy(self.log.lost_error)
            error.args = (self.broken,)
            raise error
        if self.broken:
            raise ClusterError(self.broken)
        if self._reports:
            by, peer, how = self._reports.popleft()
            raise self.mark_lost(peer, f"worker {self.workers[by].name!r} could not send it a value: {how}")

    def report_lost(self, by: int, peer: int, how: str) -> None:
        """Worker ``by`` cannot reach another, and so neither can go on: the waits say so. From any thread."""
        self._reports.append((by, peer, how))
        self._wake()

    def mark_lost(self, worker: int, how: str) -> WorkerLostError:
        """Note that a worker is lost: from now on the cluster is broken. Returns the error to raise."""
        address = self.workers[worker]
        how = self._deaths(0.2).get(worker, how)
        error = WorkerLostError(address.name, worker, address.host, address.pid, how, self.recovery_advice)
        if self.broken is None:
            _log.warning("worker %r (pid %d on %s) is lost: %s", address.name, address.pid, address.host, how)
        with uninterrupted(), self.lock:
            self._do(self.log.lose(worker, error))
            self._wake()
        return error

    def end(self, why: str) -> None:
        """The cluster cannot be used any more: what is under way fails, in all threads."""
        self.log.breaks(why)  # for a thread that waits for a worker with the lock
        self._wake()
        with uninterrupted(), self.lock:
            self._do(self.log.end(ClusterError(self.broken)))
            self._wake()

    def lost_workers(self) -> set[int]:
        """Those that have died, or leave a ping unanswered. For a cluster that has lost one, in which nothing else is sent."""
        waiting: dict[int, Any] = {}
        wakeup = PollableEvent()
        try:
            for worker in self.log.present:
                with suppress(ConnectionError), uninterrupted():
                    waiting[worker] = self.messages.urgent(worker, pickle_message(Ping()))
                    waiting[worker].add_done_callback(lambda _: wakeup.set())
            end = time.monotonic() + self.timeout
            while not all(each.done() for each in waiting.values()) and (left := end - time.monotonic()) > 0:
                self.messages.wait(wakeup, left)
            self.messages.wait(wakeup, 0.0)  # this process may have been stopped meanwhile
        finally:
            wakeup.close()
        answered = {worker for worker, each in waiting.items() if each.done() and succeeds(each.value)}
        return {*self.log.present} - answered | set(self._deaths(0.0))

    def renew(self, replaced: Mapping[int, Address], gone: Collection[int] = ()) -> list[actions.Action]:
        """Other processes are in the places of workers: go on with these, and without those that are ``gone``. Gives what the
        others are to be told."""
        with self.lock:
            for worker in replaced:
                self.counts[worker] = 0
            self._connected = {pair for pair in self._connected if set(pair).isdisjoint((*replaced, *gone))}
            self.workers = tuple(replaced.get(at, address) for at, address in enumerate(self.workers))
            self._reports.clear()
            return self.log.replace(replaced.keys(), gone)

    def mend(self, replaced: Mapping[int, Address], gone: Collection[int] = ()) -> None:
        """Go on with other processes in the places of workers, and without those that are ``gone``: the others give up what
        they do, and forget those."""
        with self.lock:
            self._do(self.renew(replaced, gone))
        calls = list(self.log.unanswered)
        self.wait_given_up()
        for call in calls:
            failure = getattr(call.answer, "failure", None)
            if failure is not None:
                raise ClusterError(f"worker {call.worker} could not forget lost workers: {failure.message}")
        self.log.replaced()

    def _explain(self, call: PendingCall, error: Exception) -> None:
        """A call failed. If its connection stands, a worker that answers a ping after it lives, and the call was at fault."""
        self.check()
        broken = f"the connection to it broke: {last_line(error)}"
        if call.worker in self._deaths(0):
            raise self.mark_lost(call.worker, broken) from None
        silence = self._silence(call.worker)
        if silence is None and not isinstance(error, ConnectionError):
            raise ClusterError(f"a call to worker {call.worker} ({call.what}) failed:\n{error}") from None
        raise self.mark_lost(call.worker, f"{broken}, and {silence}" if silence else broken) from None

    def _silence(self, worker: int) -> str | None:
        """What became of a ping that was not answered; None if it was."""
        with self._waiting([self.ping(worker)], self.timeout, None) as wait:
            ping = wait.next()
        if ping is None:
            return self.unanswered(worker)
        _, error = outcome(ping.future.value)
        return None if error is None else f"a ping failed: {last_line(error)}"

    def unanswered(self, worker: int, since: Sign | None = None) -> str:
        """How a worker is lost that gives no sign of itself; ``since`` is when it last made progress."""
        what = f"; {said}" if (said := self._said_of(worker, since)) else ""
        return f"it left a ping unanswered for {self.timeout:g} s (cluster(timeout=) says how long it may){what}"


def _end_in_fork() -> None:
    """The sockets of a process and of its fork are the same, and so each would read answers to the other."""
    for session in _of_this_process:
        session.log.breaks(
            f"this cluster belongs to process {os.getppid()}, from which this process was forked; use it there, or "
            "open another cluster here: with cluster(2) as workers: ..."
        )


os.register_at_fork(after_in_child=_end_in_fork)
