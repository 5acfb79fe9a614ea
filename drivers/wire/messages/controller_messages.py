"""The controller's messages to workers of its own process, and to others over connections.

What a step needs is one message and one answer for each worker: the thread that sends is the one that reads the answer, and the
worker's is the one that computes. What a worker must answer while it computes has a connection of its own, which another thread
of the worker reads. What comes from another host is read by a thread for each connection.
"""

import itertools
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from pippy.drivers.base.host_errors import in_words
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.base.sign_process import FarSigns
from pippy.drivers.wire.messages.worker_messages import MessageConnection, MessageQueue, MessageStream, answer_at_once
from pippy.drivers.wire.pickling import Pickled
from pippy.drivers.wire.pollable_event import PollableEvent
from pippy.drivers.wire.shared_memory_connection import SharedMemoryConnection
from pippy.drivers.wire.value_layout import copied


class OwnMessages:
    """Puts messages into the ``queue`` of a worker of this process, and has ``answer`` answer urgent ones.

    Each tensor is copied once, as the script may change what it gave and the worker what it answered with.

    >>> from pippy.drivers.wire.pickling import pickle_message, unpickle
    >>> own, ones = OwnMessages(queue := MessageQueue(), answer=str), torch.ones(2)
    >>> answer = own.post(0, pickle_message(ones))
    >>> delivery = queue.get()
    >>> delivery.reply(delivery.message.mul_(2))
    >>> ones, unpickle(answer.value()), unpickle(own.urgent(pickle_message(3)).value())
    (tensor([1., 1.]), tensor([2., 2.]), '3')
    >>> queue.close()
    """

    def __init__(self, queue: MessageQueue, answer: Callable[[Any], Any]) -> None:
        self.queue, self.answer = queue, answer

    def post(self, number: int, pickled: Pickled) -> "Future[Pickled]":
        """Put a message into the queue; the future has its answer."""
        future: Future[Pickled] = Future()
        self.queue.put_pickled(number, _own(pickled), lambda answer: future.set_result(_own(answer)))
        return future

    def urgent(self, pickled: Pickled) -> "Future[Pickled]":
        """Have a message answered now; the future has the answer."""
        future: Future[Pickled] = Future()
        future.set_result(_own(answer_at_once(self.answer, _own(pickled))))
        return future


def _own(pickled: Pickled) -> Pickled:
    """A copy that shares no memory. The worker can train with its tensors, even if the script is in inference mode."""
    with torch.inference_mode(False):
        return Pickled(pickled.data, copied(pickled.tensors))


class ControllerConnections:
    """Two to a worker: of ``sockets``, for the messages that its main thread takes, and of ``urgent``, for the others.

    Both are by the numbers of the workers. ``own`` has the workers of this process, which need no connection.

    >>> from pippy.drivers.wire.pickling import pickle_message, unpickle
    >>> here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> worker = MessageConnection(there, lambda n, message: worker.send(n, pickle_message(f"{unpickle(message)}?")))
    >>> connections, wakeup = ControllerConnections({0: here}, {}), PollableEvent()
    >>> future = connections.post(0, 3, pickle_message("a message"))
    >>> while worker.connection.step(): pass
    >>> while not future.done():
    ...     connections.wait(wakeup, 1.0)
    >>> unpickle(future.value())
    'a message?'
    >>> connections.close(), wakeup.close(), worker.connection.close()
    (None, None, None)
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket] = {},
        urgent: Mapping[int, socket.socket] = {},
        own: Mapping[int, OwnMessages] = {},
    ) -> None:
        self.own = dict(own)
        self._lock = threading.RLock()  # one thread may wait for a step while another asks for something else
        self._urgent_numbers = itertools.count()
        self._at: dict[int, int] = {}
        self._urgent_at: dict[int, int] = {}
        self._ends: list[MessageConnection | MessageStream] = []
        self._open: dict[int, int] = {}  # the descriptors that `wait` serves
        self._unanswered: list[dict[int, Future[Pickled]]] = []
        self.signs = FarSigns()
        for places, ends in ((self._at, sockets), (self._urgent_at, urgent)):
            for worker, end in ends.items():
                self._put(places, worker, end)

    def post(self, worker: int, number: int, pickled: Pickled) -> "Future[Pickled]":
        """Send a message to a worker; the future has its answer, once a thread that waits has read it."""
        if worker in self.own:
            return self.own[worker].post(number, pickled)
        return self._send(self._at[worker], number, pickled)

    def urgent(self, worker: int, pickled: Pickled) -> "Future[Pickled]":
        """Like ``post``, for a message that the worker answers even while it computes."""
        if worker in self.own:
            return self.own[worker].urgent(pickled)
        return self._send(self._urgent_at[worker], next(self._urgent_numbers), pickled)

    def connect(self, one: int, other: int) -> int | None:
        """Give two workers a socket to each other, before what is posted to them from now on. Where memory is not shared with
        both, the first is to let the other in: it is returned."""
        if not self._at:
            return None
        with self._lock, uninterrupted():
            first, second = (self._near(self._at[each]) if each in self._at else None for each in (one, other))
            if first is None or second is None:
                return one
            with in_words(f"a socket between workers {one} and {other}"):
                ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            first.send_end(other, ends[0])
            second.send_end(one, ends[1])
        return None

    def replace(self, worker: int, end: socket.socket, urgent: socket.socket) -> None:
        """Take other sockets to a worker, in whose place another process is. The calls that were not answered fail."""
        with self._lock, uninterrupted():
            for places, new in ((self._at, end), (self._urgent_at, urgent)):
                if worker in places:
                    self._mark_lost(places[worker])
                self._put(places, worker, new)
            self.signs.drop(worker)

    def drop(self, worker: int) -> None:
        """Close those to a worker that is gone. The calls that were not answered fail."""
        with self._lock, uninterrupted():
            for places in (self._at, self._urgent_at):
                if worker in places:
                    self._mark_lost(places[worker])
            self.signs.drop(worker)

    def wait(self, wakeup: PollableEvent, timeout: float) -> None:
        """Sleep until an answer comes, or the event is set, or the time is up; take in what there is."""
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        for fd, at in list(self._open.items()):
            full = (connection := self._near(at)) is not None and connection.socket_full
            poll.register(fd, select.POLLIN | (select.POLLOUT if full else 0))
        found = poll.poll(timeout * 1000)
        for fd, _ in found:
            if fd == wakeup.fileno():
                wakeup.clear()
        self._serve([self._open[fd] for fd, _ in found if fd in self._open])

    def close(self) -> None:
        """Close all; the calls that are not answered fail."""
        with self._lock:
            for at in range(len(self._ends)):
                self._mark_lost(at)
            self.signs.close()

    def _put(self, places: dict[int, int], worker: int, end: socket.socket) -> None:
        """Use a socket to a worker from now on."""
        at = places.setdefault(worker, len(self._ends))
        if end.family == socket.AF_UNIX:
            made: MessageConnection | MessageStream = MessageConnection(end, partial(self._answered, at))
            self._open[end.fileno()] = at
        else:
            made = MessageStream(end, partial(self._answered, at), partial(self._broke, at))
        if at == len(self._ends):
            self._ends.append(made)
            self._unanswered.append({})
        else:
            self._ends[at] = made

    def _near(self, at: int) -> SharedMemoryConnection | None:
        connection = self._ends[at].connection
        return connection if isinstance(connection, SharedMemoryConnection) else None

    def _send(self, at: int, number: int, pickled: Pickled) -> "Future[Pickled]":
        with self._lock, uninterrupted():  # or the other end might miss the layout of a message
            if self._ends[at].connection.ended:
                raise ConnectionError("its end of the socket is closed")
            future = self._unanswered[at][number] = Future()
            self._ends[at].send(number, pickled)
        return future

    def _answered(self, at: int, number: int, answer: Pickled | Any, _: Any = None) -> None:
        future = self._unanswered[at].pop(number, None)
        if future is not None:
            future.set_result(answer)

    def _serve(self, readable: Sequence[int]) -> None:
        with self._lock, uninterrupted():
            for at in readable:
                connection = self._near(at)
                if connection is None or connection.fd not in self._open:  # another thread has found it closed
                    continue
                try:
                    while connection.step():
                        pass
                    connection.flush()
                except ConnectionError:
                    self._mark_lost(at)

    def _mark_lost(self, at: int) -> None:
        connection = self._ends[at].connection
        for fd in [fd for fd, found in self._open.items() if found == at]:
            del self._open[fd]
        connection.close()
        unanswered, self._unanswered[at] = self._unanswered[at], {}
        for future in unanswered.values():
            future.set_exception(ConnectionError("it closed its end of the socket"))  # type: ignore[arg-type]

    def _broke(self, at: int, stream: MessageStream, how: str) -> None:
        """A connection of TCP has broken. From the thread that reads it."""
        with self._lock:
            if self._ends[at] is stream:
                self._mark_lost(at)
