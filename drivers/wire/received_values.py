"""The values that have arrived at a worker and that it has not taken yet. Other threads can add values and wake it."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pippy.drivers.base.errors import PeerLost
from pippy.drivers.wire.pollable_event import PollableEvent

ValueKey = tuple[int, int, int]  # the step, the number of the value in its program, the micro-batch


class Interrupted(Exception):
    """The step was given up while a receive waited. The worker catches this exception itself."""


class Unreadable:
    """Replaces a value that arrived but could not be read. Taking it raises ``error``."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        raise self.error  # for code that unpacks the value


class ReceivedValues:
    """The values that have arrived, by key. Other threads set ``wakeup`` when they have changed something.

    >>> received = ReceivedValues()
    >>> received.put((3, 0, 0), "value")
    >>> received.has((3, 0, 0)), received.take((3, 0, 0)), received.has((3, 0, 0))
    (True, 'value', False)
    >>> received.close()
    """

    def __init__(self) -> None:
        self.wakeup = PollableEvent()
        self.values: dict[ValueKey, Any] = {}
        self.first_step = 0  # values of earlier steps are dropped
        self.waiting_for: ValueKey | None = None
        self.when_woken: Callable[[], None] | None = (
            None  # called by the transport's thread, for a thread that has woken it
        )
        self.when_dropped: Callable[[Any], None] | None = None  # called with each value that nobody will take
        self.interrupted = False
        self._dropping = threading.Lock()  # or a value that another thread puts in might stay behind
        self._lost: set[int] = set()

    def woken(self) -> None:
        """Do what the thread that set ``wakeup`` has left to the transport's thread."""
        self.wakeup.clear()
        if self.when_woken is not None:
            self.when_woken()

    def put(self, key: ValueKey, value: Any) -> None:
        """Keep a value, unless its step was given up."""
        if key[0] >= self.first_step:
            self.values[key] = value
        elif self.when_dropped is not None:
            self.when_dropped(value)

    def has(self, key: ValueKey) -> bool:
        """Whether the value has arrived."""
        return key in self.values

    def has_now(self, key: ValueKey) -> bool:
        """Whether the value has arrived. Raises Interrupted if its step was given up."""
        if self.interrupted or key[0] < self.first_step:
            self.check(key)
        return key in self.values

    def has_awaited(self) -> bool:
        """Whether a receive waits for a value that has arrived."""
        return self.waiting_for in self.values

    def take(self, key: ValueKey) -> Any:
        """Remove the value, and return it."""
        value = self.values.pop(key)
        if type(value) is Unreadable:
            raise value.error
        return value

    def check(self, key: ValueKey) -> None:
        """Raise Interrupted if the step of this key was given up."""
        if self.interrupted or key[0] < self.first_step:
            raise Interrupted(f"step {key[0]} was given up while value {key[1]} of micro-batch {key[2]} was waited for")

    def has_any(self, wanted: Sequence[tuple[ValueKey, int]]) -> bool:
        """Whether one of the values has arrived. Raises as ``check`` and ``check_source`` do."""
        for key, source in wanted:
            if self.has(key):
                return True
            self.check(key)
            self.check_source(key, source)
        return False

    def check_source(self, key: ValueKey, source: int) -> None:
        """Raise PeerLost if the worker that should send this value is lost, and the value has not arrived."""
        if source in self._lost and not self.has(key):
            raise PeerLost(
                source,
                f"worker {source} is gone, and had not sent value {key[1]} of micro-batch {key[2]} of step {key[0]}; "
                "start a new cluster, its log says why the worker ended",
            )

    def discard_before(self, step: int) -> None:
        """Drop all values of earlier steps, and those that still arrive."""
        with self._dropping:
            self.first_step = max(self.first_step, step)
            for key in [key for key in self.values if key[0] < self.first_step]:
                self._drop(key)

    def deliver(self, key: ValueKey, value: Any) -> None:
        """Like ``put``, from any thread."""
        with self._dropping:
            self.put(key, value)
        self.wakeup.set()

    def mark_lost(self, peer: int) -> None:
        """Note that a peer is lost. From any thread."""
        self._lost.add(peer)
        self.wakeup.set()

    def forget(self, peers: Iterable[int]) -> None:
        """Other processes are in the places of these peers: they are not lost any more."""
        self._lost.difference_update(peers)

    def is_lost(self, peer: int) -> bool:
        """Whether a peer is lost."""
        return peer in self._lost

    def interrupt(self) -> None:
        """Let ``check`` raise until ``clear_interrupt``. From any thread."""
        self.interrupted = True
        self.wakeup.set()

    def clear_interrupt(self) -> None:
        """Let receives wait again."""
        self.interrupted = False

    def close(self) -> None:
        """Drop all values. Later calls of other threads do nothing."""
        self.wakeup.close()
        for key in list(self.values):
            self._drop(key)

    def _drop(self, key: ValueKey) -> None:
        value = self.values.pop(key)
        if self.when_dropped is not None:
            self.when_dropped(value)
