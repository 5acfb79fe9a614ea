"""How the controller waits for answers, and notices meanwhile that a worker is lost."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from pippy.drivers.base.errors import WorkerLostError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.base.process_signs import Sign
from pippy.drivers.session.calls import Messages, PendingCall, last_line, outcome
from pippy.drivers.wire.pollable_event import PollableEvent


class LivingWorkers(Protocol):
    """What a wait asks of the workers: a ping each ``interval`` seconds, which they are to answer within ``timeout``."""

    messages: Messages
    timeout: float
    interval: float

    def ping(self, worker: int) -> PendingCall: ...

    def check(self) -> None: ...

    def mark_lost(self, worker: int, how: str) -> WorkerLostError: ...

    def unanswered(self, worker: int) -> str: ...

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
                raise self.workers.mark_lost(worker, self.workers.unanswered(worker))

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
