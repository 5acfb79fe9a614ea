"""Where a worker's messages wait until its main thread takes them."""

import select
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pippy.drivers.wire.pickling import Pickled, pickle_message, unpickle
from pippy.drivers.wire.pollable_event import PollableEvent


class Delivery(NamedTuple):
    """A message, and the function that answers it; the answer may be given from any thread, and once.

    >>> Delivery("a message", print).reply("an answer")
    an answer
    """

    message: Any
    reply: Callable[[Any], None]


@dataclass(frozen=True)
class DeliveryFailure:
    """The answer to a message that could not be delivered, or whose handler raised.

    >>> print(DeliveryFailure("Traceback ...").text)
    Traceback ...
    """

    text: str


class Ended(Exception):
    """There will be no more messages. It never leaves the worker."""


class MessageQueue:
    """Messages in the order in which the controller sent them, whatever order they arrive in.

    RPC hands the calls of one peer to several threads, which overtake one another; so each message has a number, and waits
    for those before it. ``fileno()`` is readable exactly while a message can be taken: wait for it with ``select``,
    together with what else is to be waited for.

    >>> messages = MessageQueue()
    >>> messages.put(1, "second", print)
    >>> len(messages)
    0
    >>> messages.put(0, "first", print)
    >>> [messages.get().message, messages.get().message]
    ['first', 'second']
    >>> messages.close()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, Delivery | None] = {}
        self._ready: deque[Delivery] = deque()
        self.ended = False
        self._signal = PollableEvent()

    def put(self, sequence: int, message: Any, reply: Callable[[Any], None]) -> None:
        """Put in message number ``sequence``; from any thread."""
        self._put(sequence, Delivery(message, reply))

    def put_pickled(self, sequence: int, pickled: Pickled, answer: Callable[[Pickled], None]) -> None:
        """Unpickle a message and put it in. One that cannot be unpickled is answered at once, by a DeliveryFailure.

        >>> messages = MessageQueue()
        >>> messages.put_pickled(0, pickle_message("a message"), print)
        >>> messages.get().message
        'a message'
        >>> messages.close()
        """
        try:
            message = unpickle(pickled)
        except Exception:
            self.skip(sequence)
            answer(pickle_message(DeliveryFailure(traceback.format_exc())))
        else:
            self.put(sequence, message, lambda value: answer(pickle_message(value)))

    def skip(self, sequence: int) -> None:
        """Message number ``sequence`` will never come, so the ones behind it need not wait for it."""
        self._put(sequence, None)

    def get(self) -> Delivery:
        """The next message; waits until there is one. Raises Ended after ``end``."""
        while True:
            with self._lock:
                if self.ended:
                    raise Ended
                if self._ready:
                    return self._take()
            select.select([self._signal], [], [])

    def end(self) -> None:
        """Let ``get`` raise from now on, whatever waits."""
        with self._lock:
            self.ended = True
            self._signal.set()

    def __len__(self) -> int:
        """How many messages can be taken now."""
        with self._lock:
            return len(self._ready)

    def fileno(self) -> int:
        """The file descriptor that is readable while a message waits."""
        return self._signal.fileno()

    def close(self) -> None:
        """Close the file descriptor."""
        self._signal.close()

    def _put(self, sequence: int, delivery: Delivery | None) -> None:
        with self._lock:
            was_empty = not self._ready
            self._early[sequence] = delivery
            while self._next in self._early:
                found = self._early.pop(self._next)
                self._next += 1
                if found:
                    self._ready.append(found)
            if was_empty and self._ready:
                self._signal.set()

    def _take(self) -> Delivery:
        delivery = self._ready.popleft()
        if not self._ready:
            self._signal.clear()
        return delivery
