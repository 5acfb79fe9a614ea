"""What has arrived at a worker and was not taken yet, and how the thread that waits for it is woken."""

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from pippy.drivers.errors import PeerLost
from pippy.drivers.transport.bell import Bell
from pippy.drivers.transport.interface import Interrupted, Key, Transport


class Mailbox:
    """The values that have arrived, by key. Its ``bell`` rings when another thread has a say.

    >>> mailbox = Mailbox()
    >>> mailbox.put((3, 0, 0), "value")
    >>> mailbox.has((3, 0, 0)), mailbox.take((3, 0, 0)), mailbox.has((3, 0, 0))
    (True, 'value', False)
    >>> mailbox.close()
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.arrived: dict[Key, Any] = {}
        self.below = 0
        self.waits: Key | None = None
        self._interrupted = False
        self._delivered: deque[tuple[Key, Any]] = deque()
        self._lost: set[int] = set()

    def put(self, key: Key, value: Any) -> None:
        """Keep a value, unless its step was given up."""
        if key[0] >= self.below:
            self.arrived[key] = value

    def has(self, key: Key) -> bool:
        """Is the value here?"""
        while self._delivered:
            self.put(*self._delivered.popleft())
        return key in self.arrived

    def take(self, key: Key) -> Any:
        """The value, which is here no longer."""
        value = self.arrived.pop(key)
        if type(value) is Unreadable:
            raise value.error
        return value

    def check(self, key: Key) -> None:
        """Raise if there is no point in waiting for this key."""
        if self._interrupted or key[0] < self.below:
            raise Interrupted(f"step {key[0]} was given up while slot {key[1]} of micro-batch {key[2]} was waited for")

    def has_any(self, wanted: Sequence[tuple[Key, int]]) -> bool:
        """Is one of the values here? Raises if there is no point in waiting for one of them."""
        for key, source in wanted:
            if self.has(key):
                return True
            self.check(key)
            self.check_source(key, source)
        return False

    def check_source(self, key: Key, source: int) -> None:
        """Raise if the worker that should send this value is lost, and it has not come after all."""
        if source in self._lost and not self.has(key):
            raise PeerLost(
                source,
                f"worker {source} is gone, and had not sent slot {key[1]} of micro-batch {key[2]} of step {key[0]}; "
                "start a new cluster, its log says why the worker ended",
            )

    def forget(self, below: int) -> None:
        """Drop all values of steps before ``below``, now and later."""
        self.below = max(self.below, below)
        for key in [key for key in self.arrived if key[0] < self.below]:
            del self.arrived[key]

    def deliver(self, key: Key, value: Any) -> None:
        """Like ``put``, from any thread."""
        self._delivered.append((key, value))
        self.bell.ring()

    def lose(self, peer: int) -> None:
        """A peer is lost. From any thread."""
        self._lost.add(peer)
        self.bell.ring()

    def lost(self, peer: int) -> bool:
        """Is the peer lost?"""
        return peer in self._lost

    def interrupt(self) -> None:
        """From any thread."""
        self._interrupted = True
        self.bell.ring()

    def clear_interrupt(self) -> None:
        """Waiting has a point again."""
        self._interrupted = False

    def close(self) -> None:
        """Late calls of other threads do nothing then."""
        self.bell.close()
        self.arrived.clear()


class Unreadable:
    """Stands for a value that came but could not be read; taking it raises ``error``."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        raise self.error  # to whoever takes it apart


class MailboxTransport(Transport):
    """What all transports with a mailbox do alike: what other threads have to say goes to it."""

    mailbox: Mailbox

    def wait_any(self, wanted: Sequence[tuple[Key, int]], seconds: float | None = None) -> None:
        box, end = self.mailbox, None if seconds is None else time.monotonic() + seconds
        box.waits = wanted[0][0]
        try:
            while not box.has_any(wanted):
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._wait_for_something(left)
        finally:
            box.waits = None

    @abstractmethod
    def _wait_for_something(self, seconds: float | None) -> None:
        """Take in what comes next, or wait for so many seconds in vain."""

    def interrupt(self) -> None:
        self.mailbox.interrupt()

    def clear_interrupt(self) -> None:
        self.mailbox.clear_interrupt()

    def waiting_for(self) -> Key | None:
        return self.mailbox.waits

    def deliver(self, key: Key, value: Any) -> None:
        self.mailbox.deliver(key, value)

    def lose(self, peer: int) -> None:
        self.mailbox.lose(peer)
