"""Calls to workers: where those are, what carries messages to them, what they answer, and how the controller waits for that.

While it waits, it notices that a worker is lost.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from torch.futures import Future

from pippy.drivers.base.errors import ClusterError, WorkerLostError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.base.process_signs import Sign
from pippy.drivers.base.sign_process import FarSigns
from pippy.drivers.protocol.commands import Answer, Failure
from pippy.drivers.wire.messages.worker_messages import DeliveryFailure
from pippy.drivers.wire.pickling import Pickled, unpickle
from pippy.drivers.wire.pollable_event import PollableEvent

Value = TypeVar("Value")


@dataclass(frozen=True)
class Address:
    """Where a worker is: its name, its host and its process. Those with the same text of ``memory`` can share memory. If it
    ``is_here``, this process can ask the system what that process does.

    >>> Address("first", "localhost", 4711).name
    'first'
    """

    name: str
    host: str
    pid: int
    memory: str = ""
    is_here: bool = False


@dataclass(eq=False)
class PendingCall:
    """A call to one worker. ``done`` says whether the worker has answered, and ``answer`` is what it answered.

    >>> import torch
    >>> from pippy.drivers.wire.pickling import pickle_message
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
    """Carries messages to workers. A call for a worker that is known to be gone raises a ConnectionError.

    ``signs`` says what the processes of workers of other hosts do.
    """

    @property
    def signs(self) -> FarSigns: ...

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
        if succeeds(read):
            raise  # it is of a handler of the script, for a signal
        return None, error


def succeeds(read: Callable[[], Any]) -> bool:
    """Whether an answer can be read.

    >>> succeeds(lambda: 3), succeeds(lambda: 3 // 0)
    (True, False)
    """
    with uninterrupted():
        try:
            read()
        except Exception:
            return False
    return True


def answer_to(call: PendingCall) -> Answer:
    """What a worker answered to a command: a failure, too, if it could not read the message, or we cannot read the answer."""
    answer, error = outcome(lambda: call.answer)
    if error is not None:
        return Answer(failure=Failure(f"{type(error).__name__}: {error}", "", where="the exchange of messages"))
    return cast(Answer, answer)


def last_line(error: Exception) -> str:
    """The last line of an error's text.

    >>> last_line(ValueError("first\\nlast"))
    'last'
    """
    return (str(error).strip() or repr(error)).splitlines()[-1]


class LivingWorkers(Protocol):
    """What a wait asks of the workers: a ping each ``interval`` seconds, which they are to answer within ``timeout``."""

    messages: Messages
    timeout: float
    interval: float

    def ping(self, worker: int) -> PendingCall: ...

    def check(self) -> None: ...

    def mark_lost(self, worker: int, how: str) -> WorkerLostError: ...

    def unanswered(self, worker: int, since: Sign | None) -> str: ...

    def sign(self, worker: int) -> Sign | None: ...

    def heard(self, worker: int, told: Any) -> None: ...


class CallWait:
    """One wait for several calls, with the pings that it sends if it lasts."""

    def __init__(
        self,
        workers: LivingWorkers,
        calls: Iterable[PendingCall],
        timeout: float | None,
        over: Callable[[], bool] | None,
    ) -> None:
        self.workers, self.over = workers, over
        self.waiting = set(calls)
        self.arrived: deque[PendingCall] = deque()
        self.wakeup, self.thread = PollableEvent(), threading.get_ident()
        self.end = None if timeout is None else time.monotonic() + timeout
        self.pings: dict[int, tuple[PendingCall, float]] = {}
        self.signs: dict[int, Sign | None] = {}  # of processes, when they last made progress
        for call in self.waiting:
            self._watch(call)

    def next(self) -> PendingCall | None:
        """The next call that is done; None if there is none left, or the time is up."""
        since = time.monotonic()
        while not self._is_over():
            if self.arrived:
                call = self.arrived.popleft()
                if call in self.waiting:
                    self.waiting.remove(call)
                    return call
                self._pong(call)
                since = time.monotonic()
                continue
            due = self._due(since)
            self.workers.messages.wait(self.wakeup, max(0.0, due - time.monotonic()))
            self.workers.check()
            now = time.monotonic()
            if self.arrived or now < due:
                continue
            if now - due > self.workers.timeout / 2:
                since += self._postpone(now - due)
                continue
            if self.end is not None and now >= self.end:
                return None
            self._ping(now)
            since = now
        return None

    def sleep(self) -> None:
        """Wait until it is over, also in a cluster that is broken."""
        while not self._is_over():
            self.workers.messages.wait(self.wakeup, self.workers.interval)

    def close(self) -> None:
        """Close the event."""
        self.wakeup.close()

    def _is_over(self) -> bool:
        return not self.waiting if self.over is None else self.over()

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
        due = [since + self.workers.interval, *(sent + self.workers.timeout for _, sent in self.pings.values())]
        return min(due if self.end is None else [*due, self.end])

    def _ping(self, now: float) -> None:
        for worker in {call.worker for call in self.waiting}:
            if worker not in self.pings:
                ping = self.workers.ping(worker)
                self.pings[worker], self.signs[worker] = (ping, now), self.workers.sign(worker)
                with uninterrupted():
                    self._watch(ping)
            elif self._moves(worker):  # its Python is not let to run
                self.pings[worker] = self.pings[worker][0], now
            elif now - self.pings[worker][1] >= self.workers.timeout:
                raise self.workers.mark_lost(worker, self.workers.unanswered(worker, self.signs[worker]))

    def _moves(self, worker: int) -> bool:
        """Whether the process of a worker has made progress since it last did."""
        before, sign = self.signs[worker], self.workers.sign(worker)
        if before is None or sign is None or not sign.moved_since(before):
            return False
        self.signs[worker] = sign
        return True

    def _pong(self, ping: PendingCall) -> None:
        self.pings.pop(ping.worker, None)
        _, error = outcome(ping.future.value)
        if error is not None:
            how = f"the connection to it broke: {last_line(error)}"
            raise self.workers.mark_lost(ping.worker, how)
        self.workers.heard(ping.worker, ping.answer)
