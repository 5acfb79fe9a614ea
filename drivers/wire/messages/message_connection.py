"""Numbered messages between the controller and a worker: over a socket of their host, or a connection of TCP between two."""

import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from pippy.drivers.wire.messages.message_queue import MessageQueue
from pippy.drivers.wire.pickling import Pickled
from pippy.drivers.wire.received_values import Unreadable, ValueKey
from pippy.drivers.wire.shared_memory_connection import SharedMemoryConnection
from pippy.drivers.wire.tcp_connection import TcpConnection

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
