"""How the controller calls workers and waits for their answers, and how it notices that a worker is lost."""

import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch.futures import Future

from pippy.drivers.base.errors import RECOVERY_ADVICE, ClusterError, WorkerLostError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.protocol.urgent import Connect, Ping
from pippy.drivers.wire.messages.controller_connections import ControllerConnections
from pippy.drivers.wire.messages.message_queue import DeliveryFailure
from pippy.drivers.wire.pickling import Pickled, pickle_message, unpickle
from pippy.drivers.wire.pollable_event import PollableEvent


@dataclass(frozen=True)
class Address:
    """Where a worker is: its name, its host and its process.

    >>> Address("first", "localhost", 4711).name
    'first'
    """

    name: str
    host: str
    pid: int


@dataclass(eq=False)
class PendingCall:
    """A call to one worker. ``done`` says whether the worker has answered, and ``answer`` is what it answered.

    >>> import torch
    >>> future = torch.futures.Future()
    >>> call = PendingCall(0, "Ping", future)
    >>> call.done
    False
    >>> future.set_result(pickle_message("pong"))
    >>> call.done, call.answer
    (True, 'pong')
    """

    worker: int
    what: str
    future: Any = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether the call is over."""
        return self.future.done()

    @property
    def answer(self) -> Any:
        """What the worker answered."""
        assert self.done, "only a call that completed() has yielded has an answer"
        value = unpickle(self.future.value())
        if isinstance(value, DeliveryFailure):
            raise ClusterError(f"worker {self.worker} could not take a message of type {self.what}:\n{value.text}")
        return value


class Messages(Protocol):
    """Carries messages to workers. A call for a worker that is known to be gone raises a ConnectionError."""

    def post(self, worker: int, number: int, pickled: Pickled) -> "Future[Pickled]":
        """Put a message into a worker's queue; the future has what its main thread answers."""

    def urgent(self, worker: int, pickled: Pickled) -> "Future[Pickled]":
        """Send a message that is answered even while the worker computes."""

    def connect(self, one: int, other: int) -> int | None:
        """Let two workers pass values, before what is posted to them from now on.

        If a worker is to do that, return it.
        """

    def wait(self, wakeup: PollableEvent, timeout: float) -> None:
        """Sleep until an answer comes, or the event is set, or the time is up."""


Value = TypeVar("Value")
_of_this_process = weakref.WeakSet["Control"]()


class Control:
    """Calls to the workers of one cluster. ``counts`` has how many messages were posted to each.

    Nothing is sent but what is asked for. Only a wait that lasts longer than ``interval`` seconds pings those that it waits
    for; a worker that leaves a ping unanswered for ``timeout`` seconds is lost. So a worker that was killed is noticed
    within milliseconds, and one that is stopped, or out of reach, within ``interval + timeout``.

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
        self._broken: str | None = None
        self._lost: WorkerLostError | None = None
        self.recovery_advice = recovery_advice
        self.lost: str | None = None  # which worker, and how, once one is lost
        self._waits: set[weakref.ref[_Wait]] = set()  # of all threads; one that Ctrl-C has left is soon gone
        self._reports: deque[tuple[int, int, str]] = deque()
        self._deaths = deaths
        self.messages = messages or ControllerConnections()
        self._lock = threading.Lock()
        self._connected: set[tuple[int, int]] = set()
        self.to_replace: set[int] = set()  # those that are lost, until others are in their places
        self.starts = [0] * len(self.workers)  # how often another process has taken the place of each worker
        _of_this_process.add(self)

    @property
    def broken(self) -> str | None:
        """Why the cluster cannot be used any more, once it cannot: then all waits end, in all threads."""
        return self._broken

    @broken.setter
    def broken(self, why: str) -> None:
        self._broken = why
        self._wake()

    def _wake(self) -> None:
        for each in self._waits.copy():
            if (wait := each()) is not None:
                wait.wakeup.set()

    def report_lost(self, by: int, peer: int, how: str) -> None:
        """Worker ``by`` cannot reach another, and so neither can go on: the waits say so. From any thread."""
        self._reports.append((by, peer, how))
        self._wake()

    def post(self, worker: int, message: Any) -> PendingCall:
        """Put a message into a worker's queue. The call is answered when the worker's main thread replies."""
        self.check()
        pickled = pickle_message(message)
        with self._lock:  # the numbers must have no holes: one is used only by a message that is on its way
            number = self.counts[worker]
            future = self._start(worker, lambda: self.messages.post(worker, number, pickled))
            self.counts[worker] += 1
        return PendingCall(worker, type(message).__name__, future)

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
                    self.wait(self.urgent(first, Connect(*pair)))
                    self._connected.add(pair)

    def urgent(self, worker: int, message: Any) -> PendingCall:
        """Ask a worker something that it answers even while it computes."""
        self.check()
        return self._urgent(worker, message)

    def completed(self, calls: Iterable[PendingCall], timeout: float | None = None) -> Iterator[PendingCall]:
        """Yield each call when it is answered; raise WorkerLostError if its worker is lost.

        Ctrl-C interrupts the wait and breaks nothing: the calls go on, and can be waited for again. With a ``timeout`` the
        iteration just ends that many seconds after it began.
        """
        self.check()
        with self._waiting(calls, timeout) as wait:
            while (call := wait.next()) is not None:
                self._inspect(call)
                yield call

    @contextmanager
    def _waiting(self, calls: Iterable[PendingCall], timeout: float | None) -> "Iterator[_Wait]":
        """A wait, which is closed in any case: also if Ctrl-C comes as it begins."""
        wait = None
        try:
            with uninterrupted():
                wait = _Wait(self, calls, timeout)
            yield wait
        finally:
            if wait is not None:
                wait.close()

    def wait(self, call: PendingCall) -> Any:
        """The answer of one call, when it comes."""
        (done,) = self.completed([call])
        return done.answer

    def check(self) -> None:
        """Raise if the cluster is broken or closed, or a worker has reported that it lost another."""
        if self.broken:
            raise ClusterError(self.broken)
        if self._reports:
            by, peer, how = self._reports.popleft()
            raise self.mark_lost(peer, f"worker {self.workers[by].name!r} could not send it a value: {how}")

    def check_waiting(self) -> None:
        """Like `check`, in a wait that has begun: where another thread has found a worker lost, say so here, too."""
        if self._lost is not None:
            raise copy.copy(self._lost)
        self.check()

    def mark_lost(self, worker: int, how: str) -> WorkerLostError:
        """Note that a worker is lost: from now on the cluster is broken. Returns the error to raise."""
        address = self.workers[worker]
        self.to_replace.add(worker)
        how = self._deaths(0.2).get(worker, how)
        error = WorkerLostError(address.name, worker, address.host, address.pid, how, self.recovery_advice)
        self.lost = self.lost or str(error)
        self._lost = self._lost if self.broken else error
        self.broken = self.broken or f"this cluster lost a worker and cannot go on ({error})"
        return error

    def lost_workers(self) -> set[int]:
        """Those that have died, or leave a ping unanswered. For a cluster that has lost one, in which nothing else is sent."""
        waiting: dict[int, Any] = {}
        wakeup = PollableEvent()
        try:
            for worker in range(len(self.workers)):
                with suppress(ConnectionError), uninterrupted():
                    waiting[worker] = self.messages.urgent(worker, pickle_message(Ping()))
                    waiting[worker].add_done_callback(lambda _: wakeup.set())
            end = time.monotonic() + self.timeout
            while not all(each.done() for each in waiting.values()) and (left := end - time.monotonic()) > 0:
                self.messages.wait(wakeup, left)
            self.messages.wait(wakeup, 0.0)  # this process may have been stopped meanwhile
        finally:
            wakeup.close()
        answered = {worker for worker, each in waiting.items() if each.done() and _succeeds(each.value)}
        return {*range(len(self.workers))} - answered | set(self._deaths(0.0))

    def mend(self, replaced: Mapping[int, Address]) -> None:
        """Other processes are in the places of lost workers: go on with these."""
        with self._lock:
            for worker in replaced:
                self.counts[worker], self.starts[worker] = 0, self.starts[worker] + 1
            self._connected = {pair for pair in self._connected if not replaced.keys() & set(pair)}
            self.workers = tuple(replaced.get(at, address) for at, address in enumerate(self.workers))
            self._reports.clear()
            self._broken = self._lost = self.lost = None

    def ping(self, worker: int) -> PendingCall:
        """Ask whether a worker lives."""
        return self._urgent(worker, Ping())

    def _urgent(self, worker: int, message: Any) -> PendingCall:
        pickled = pickle_message(message)
        future = self._start(worker, lambda: self.messages.urgent(worker, pickled))
        return PendingCall(worker, type(message).__name__, future)

    def _start(self, worker: int, call: Callable[[], Any]) -> Any:
        """Make a call. For a worker that is known to be gone it fails at once."""
        try:
            return call()
        except ConnectionError as error:
            self.check()
            raise self.mark_lost(worker, f"the connection to it broke: {_last_line(error)}") from None

    def _inspect(self, call: PendingCall) -> None:
        _, error = outcome(call.future.value)
        if error is not None:
            self._explain(call, error)

    def _explain(self, call: PendingCall, error: Exception) -> None:
        """A call failed. A worker that answers a ping after it lives, and the call itself was at fault."""
        self.check_waiting()
        broken = f"the connection to it broke: {_last_line(error)}"
        if call.worker in self._deaths(0):
            raise self.mark_lost(call.worker, broken) from None
        silence = self._silence(call.worker)
        if silence is None:
            raise ClusterError(f"a call to worker {call.worker} ({call.what}) failed:\n{error}") from None
        raise self.mark_lost(call.worker, f"{broken}, and {silence}") from None

    def _silence(self, worker: int) -> str | None:
        """What became of a ping that was not answered; None if it was."""
        with self._waiting([self.ping(worker)], self.timeout) as wait:
            ping = wait.next()
        if ping is None:
            return self.unanswered()
        _, error = outcome(ping.future.value)
        return None if error is None else f"a ping failed: {_last_line(error)}"

    def unanswered(self) -> str:
        """How a worker is lost that gives no sign of itself."""
        return f"it left a ping unanswered for {self.timeout:g} s"


def _end_in_fork() -> None:
    """The sockets of a process and of its fork are the same, and so each would read answers to the other."""
    for control in _of_this_process:
        control._broken = (
            f"this cluster belongs to process {os.getppid()}, from which this process was forked; use it there, or "
            "open another cluster here: with cluster(2) as workers: ..."
        )


os.register_at_fork(after_in_child=_end_in_fork)


def outcome(read: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    """An answer, and no error; or nothing, and why it cannot be read. What a handler of the script raises goes on.

    >>> outcome(lambda: 3)
    (3, None)
    >>> outcome(lambda: 3 // 0)
    (None, ZeroDivisionError('integer division or modulo by zero'))
    """
    try:
        return read(), None
    except Exception as error:  # RPC raises errors of all kinds
        if _succeeds(read):
            raise  # it is of a handler of the script, for a signal
        return None, error


def _succeeds(read: Callable[[], Any]) -> bool:
    with uninterrupted():
        try:
            read()
        except Exception:
            return False
    return True


def _last_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[-1]


class _Wait:
    """One wait for several calls, with the pings that it sends if it lasts."""

    def __init__(self, control: Control, calls: Iterable[PendingCall], timeout: float | None) -> None:
        self.control = control
        self.waiting = set(calls)
        self.arrived: deque[PendingCall] = deque()
        self.wakeup, self.thread = PollableEvent(), threading.get_ident()
        self.end = None if timeout is None else time.monotonic() + timeout
        self.pings: dict[int, tuple[PendingCall, float]] = {}
        self._own = weakref.ref(self, control._waits.discard)
        control._waits.add(self._own)
        for call in self.waiting:
            self._watch(call)

    def next(self) -> PendingCall | None:
        """The next call that is done; None if there is none left, or the time is up."""
        since = time.monotonic()
        while self.waiting:
            if self.arrived:
                call = self.arrived.popleft()
                if call in self.waiting:
                    self.waiting.remove(call)
                    return call
                self._pong(call)
                since = time.monotonic()
                continue
            due = self._due(since)
            self.control.messages.wait(self.wakeup, max(0.0, due - time.monotonic()))
            self.control.check_waiting()
            now = time.monotonic()
            if self.arrived or now < due:
                continue
            if now - due > self.control.timeout / 2:
                since += self._postpone(now - due)
                continue
            if self.end is not None and now >= self.end:
                return None
            self._ping(now)
            since = now
        return None

    def close(self) -> None:
        """Close the event."""
        self.control._waits.discard(self._own)
        self.wakeup.close()

    def _watch(self, call: PendingCall) -> None:
        # torch would print what a callback raises and go on; this one cannot raise, as long as Ctrl-C waits
        call.future.add_done_callback(lambda _: self._done(call))

    def _done(self, call: PendingCall) -> None:
        self.arrived.append(call)
        if threading.get_ident() != self.thread:
            self.wakeup.set()

    def _postpone(self, late: float) -> float:
        """This process was stopped for so long, as under the closed lid of a laptop, and the workers perhaps, too.

        They get that much more time, and so does what has a limit.
        """
        self.pings = {worker: (ping, sent + late) for worker, (ping, sent) in self.pings.items()}
        if self.end is not None:
            self.end += late
        return late

    def _due(self, since: float) -> float:
        """Until when to wait: the next round of pings, the first deadline of one, or the end."""
        due = [since + self.control.interval, *(sent + self.control.timeout for _, sent in self.pings.values())]
        return min(due if self.end is None else [*due, self.end])

    def _ping(self, now: float) -> None:
        for worker in {call.worker for call in self.waiting}:
            if worker not in self.pings:
                ping = self.control.ping(worker)
                self.pings[worker] = ping, now
                with uninterrupted():
                    self._watch(ping)
            elif now - self.pings[worker][1] >= self.control.timeout:
                raise self.control.mark_lost(worker, self.control.unanswered())

    def _pong(self, ping: PendingCall) -> None:
        self.pings.pop(ping.worker, None)
        _, error = outcome(ping.future.value)
        if error is not None:
            how = f"the connection to it broke: {_last_line(error)}"
            raise self.control.mark_lost(ping.worker, how)
