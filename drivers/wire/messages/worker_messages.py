"""Messages for a worker: the connections that they come over, and the queue where they wait until the main thread takes them.

A connection is a socket of one host, or one of TCP between two. Most messages are numbered, and wait. Urgent ones are answered
at once, on a thread that is not the worker's own.
"""

import select
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pippy.drivers.wire.pickling import Pickled, pickle_message, unpickle
from pippy.drivers.wire.pollable_event import PollableEvent
from pippy.drivers.wire.received_values import Unreadable, ValueKey
from pippy.drivers.wire.shared_memory_connection import SharedMemoryConnection
from pippy.drivers.wire.tcp_connection import TcpConnection


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


LIMIT = 1 << 25  # bytes of shared memory that one direction keeps; a larger message has memory of its own


class MessageConnection:
    """One end. What arrives is handed to ``take`` with its number; for a message that could not be read, an Unreadable.

    >>> from pippy.drivers.wire.pickling import pickle_message, unpickle
    >>> sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> here, there = (MessageConnection(end, lambda number, message: print(number, unpickle(message))) for end in sockets)
    >>> here.send(7, pickle_message("a message"))
    >>> while there.connection.step(): pass
    7 a message
    >>> here.connection.close(), there.connection.close()
    (None, None)
    """

    first_step = 0  # messages have no steps: none is dropped

    def __init__(self, end: socket.socket, take: Callable[[int, Any], None]) -> None:
        self.take = take
        self.connection = SharedMemoryConnection(end, self, LIMIT, keeps_larger=False)

    def send(self, number: int, pickled: Pickled) -> None:
        """Send a message. What finds no room now waits in this process, until the connection gets a turn."""
        self.connection.send((number, 0, 0), tuple(pickled))

    def put(self, key: ValueKey, value: Any) -> None:
        """For the connection: a message has arrived."""
        self.take(key[0], value if type(value) is Unreadable else Pickled(*value))


class WorkerMessageConnection(MessageConnection):
    """A worker's end: messages go to its queue, and answers back under their numbers.

    >>> from pippy.drivers.wire.pickling import pickle_message, unpickle
    >>> sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> here = MessageConnection(sockets[0], lambda number, message: print(number, unpickle(message)))
    >>> there = WorkerMessageConnection(sockets[1], messages := MessageQueue())
    >>> here.send(0, pickle_message("a message"))
    >>> while there.connection.step(): pass
    >>> delivery = messages.get()
    >>> delivery.reply(f"{delivery.message} is answered")
    >>> while here.connection.step(): pass
    0 a message is answered
    >>> here.connection.close(), there.connection.close(), messages.close()
    (None, None, None)
    """

    def __init__(self, end: socket.socket, messages: MessageQueue) -> None:
        super().__init__(end, lambda number, pickled: messages.put_pickled(number, pickled, partial(self.send, number)))


SendMessage = Callable[[int, Pickled], None]


class MessageStream:
    """One end, between hosts. A thread hands what arrives to ``take``: the number, the message, and `send` for an answer.

    ``broke`` is called when the connection breaks.

    >>> from pippy.drivers.wire.pickling import pickle_message, unpickle
    >>> import queue
    >>> answers, (one, other) = queue.SimpleQueue(), socket.socketpair()
    >>> here = MessageStream(one, lambda number, message, _: answers.put((number, unpickle(message))), lambda stream, how: None)
    >>> there = MessageStream(other, lambda number, message, send: send(number, message), lambda stream, how: answers.put(how))
    >>> here.send(7, pickle_message("a message"))
    >>> answers.get()
    (7, 'a message')
    >>> here.connection.close(), answers.get()
    (None, 'closed')
    """

    def __init__(
        self,
        end: socket.socket,
        take: Callable[[int, Any, SendMessage], None],
        broke: Callable[["MessageStream", str], None],
    ) -> None:
        self.take, self._sending = take, threading.Lock()
        self._made = threading.Event()  # the thread may read something before the connection is known here
        self.connection = TcpConnection(end, self, partial(broke, self))
        self._made.set()

    def send(self, number: int, pickled: Pickled) -> None:
        """Send a message, from any thread. What finds no room now waits in this process."""
        self._made.wait()
        with self._sending:
            self.connection.send((number, 0, 0), tuple(pickled))

    def deliver(self, key: ValueKey, value: Any) -> None:
        """For the connection: a message has arrived."""
        self.take(key[0], value if type(value) is Unreadable else Pickled(*value), self.send)


def answer_at_once(answer: Callable[[Any], Any], pickled: Pickled) -> Pickled:
    """What ``answer`` gives for a message, or what it raised.

    >>> unpickle(answer_at_once(str, pickle_message(3)))
    '3'
    >>> unpickle(answer_at_once(int, pickle_message("x"))).text.splitlines()[-1]
    "ValueError: invalid literal for int() with base 10: 'x'"
    """
    try:
        return pickle_message(answer(unpickle(pickled)))
    except Exception:
        return pickle_message(DeliveryFailure(traceback.format_exc()))


class UrgentConnection:
    """A worker's end of a connection for urgent messages. ``answer`` answers each of them. At the end ``ended`` is called.

    >>> here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> answers = []
    >>> controller = MessageConnection(here, lambda number, message: answers.append((number, unpickle(message))))
    >>> thread = UrgentConnection(there, str.upper).start()
    >>> controller.send(7, pickle_message("a message"))
    >>> while not answers:
    ...     _ = select.select([here], [], [], 10), controller.connection.step()
    >>> answers
    [(7, 'A MESSAGE')]
    >>> controller.connection.close()
    >>> thread.join()
    """

    def __init__(
        self, end: socket.socket, answer: Callable[[Any], Any], ended: Callable[[], object] = lambda: None
    ) -> None:
        self._messages = MessageConnection(end, self._take)
        self._answer, self._ended = answer, ended

    def start(self) -> threading.Thread:
        """Answer on a thread, until the other end is closed."""
        thread = threading.Thread(target=self._serve, name="pippy urgent", daemon=True)
        thread.start()
        return thread

    def _take(self, number: int, message: Any) -> None:
        self._messages.send(number, answer_at_once(self._answer, message))

    def _serve(self) -> None:
        connection, waiting = self._messages.connection, select.poll()
        try:
            while not connection.ended:
                waiting.register(connection.fd, select.POLLIN | (select.POLLOUT if connection.socket_full else 0))
                waiting.poll()
                while connection.step():
                    pass
                connection.flush()
        except ConnectionError:
            pass
        connection.close()
        self._ended()
