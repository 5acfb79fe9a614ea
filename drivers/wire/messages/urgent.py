"""Urgent messages to a worker: answered at once, on a thread that is not the worker's own."""

import select
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

from pippy.drivers.wire.messages.message_connection import MessageConnection
from pippy.drivers.wire.messages.message_queue import DeliveryFailure
from pippy.drivers.wire.pickling import Pickled, pickle_message, unpickle


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
    """A worker's end of a connection for urgent messages. ``answer`` answers each of them.

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

    def __init__(self, end: socket.socket, answer: Callable[[Any], Any]) -> None:
        self._messages = MessageConnection(end, self._take)
        self._answer = answer

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
