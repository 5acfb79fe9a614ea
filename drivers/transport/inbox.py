"""Where a worker's messages wait until its main thread takes them."""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple


class Delivery(NamedTuple):
    """A message, and the function that answers it; the answer may be given from any thread, and once.

    >>> Delivery("a message", print).reply("an answer")
    an answer
    """

    message: Any
    reply: Callable[[Any], None]


class Ended(Exception):
    """There will be no more messages. It never leaves the worker."""


class Inbox:
    """Messages in the order in which the controller sent them, whatever order they arrive in.

    RPC hands the calls of one peer to several threads, which overtake one another; so each message has a number, and waits
    for those before it. ``fileno()`` is readable exactly while a message can be taken: wait for it with ``select``,
    together with what else is to be waited for.

    >>> inbox = Inbox()
    >>> inbox.put(1, "second", print)
    >>> len(inbox)
    0
    >>> inbox.put(0, "first", print)
    >>> [inbox.get().message, inbox.get().message]
    ['first', 'second']
    >>> inbox.close()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, Delivery | None] = {}
        self._ready: deque[Delivery] = deque()
        self.ended = False
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, sequence: int, message: Any, reply: Callable[[Any], None]) -> None:
        """Take in message number ``sequence``; from any thread."""
        self._take_in(sequence, Delivery(message, reply))

    def skip(self, sequence: int) -> None:
        """Message number ``sequence`` will never come, so the ones behind it need not wait for it."""
        self._take_in(sequence, None)

    def get(self) -> Delivery:
        """The next message; waits until there is one. Raises Ended after ``end``."""
        while True:
            with self._lock:
                if self.ended:
                    raise Ended
                if self._ready:
                    return self._take_out()
            select.select([self._signal], [], [])

    def end(self) -> None:
        """Let ``get`` raise from now on, whatever waits."""
        with self._lock:
            self.ended = True
            os.eventfd_write(self._signal, 1)

    def __len__(self) -> int:
        """How many messages can be taken now."""
        with self._lock:
            return len(self._ready)

    def fileno(self) -> int:
        """The file descriptor that is readable while a message waits."""
        return self._signal

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self._signal)

    def _take_in(self, sequence: int, delivery: Delivery | None) -> None:
        with self._lock:
            was_empty = not self._ready
            self._early[sequence] = delivery
            while self._next in self._early:
                found = self._early.pop(self._next)
                self._next += 1
                if found:
                    self._ready.append(found)
            if was_empty and self._ready:
                os.eventfd_write(self._signal, 1)

    def _take_out(self) -> Delivery:
        delivery = self._ready.popleft()
        if not self._ready:
            os.eventfd_read(self._signal)
        return delivery
