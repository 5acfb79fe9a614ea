"""The controller's ends of its lines to the workers of its host.

A call of RPC takes several threads on either side, one after the other. What a step needs is one message and one answer
for each worker: here the thread that sends is the one that reads the answer, and the worker's is the one that computes.
"""

import select
import socket
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pippy.drivers.interrupts import uninterrupted
from pippy.drivers.transport.bell import Bell
from pippy.drivers.transport.line import LARGE, Line
from pippy.drivers.transport.wire import Packed, size

Future = torch.futures.Future


class Lines:
    """``ends`` has a socket for each worker, or is empty: then there are no lines.

    >>> from pippy.drivers.transport.wire import pack, unpack
    >>> here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> worker = Line(there, lambda number, packed: worker.send(number, pack(unpack(packed) + " is answered")))
    >>> lines, bell = Lines([here]), Bell()
    >>> future = lines.post(0, 3, pack("a message"))
    >>> while worker.channel.step(): pass
    >>> while not future.done():
    ...     lines.wait(bell, 1.0)
    >>> unpack(future.value())
    'a message is answered'
    >>> lines.close(), bell.close(), worker.channel.close()
    (None, None, None)
    """

    def __init__(self, ends: Sequence[socket.socket] = ()) -> None:
        self._lock = threading.RLock()  # one thread may wait for a step while another asks for something else
        self._lines = [Line(end, partial(self.answered, worker)) for worker, end in enumerate(ends)]
        self._open = {line.channel.fd: worker for worker, line in enumerate(self._lines)}
        self._waited: list[dict[int, Future[Packed]]] = [{} for _ in self._lines]

    def carry(self, packed: Packed) -> bool:
        """Whether a message should be posted here."""
        return bool(self._lines) and size(packed) <= LARGE

    def post(self, worker: int, number: int, packed: Packed) -> "Future[Packed]":
        """Send a message to a worker; the future has its answer, once a thread that waits has read it."""
        with self._lock:
            channel = self._lines[worker].channel
            if channel.ended:
                raise ConnectionError("its end of the socket is closed")
            future = self._waited[worker][number] = Future()
            self._lines[worker].send(number, packed)
        return future

    def answered(self, worker: int, number: int, packed: Packed | Any) -> None:
        """A worker's answer, however it came."""
        future = self._waited[worker].pop(number, None)
        if future is not None:
            future.set_result(packed)

    def wait(self, bell: Bell, timeout: float) -> None:
        """Sleep until an answer comes, or the bell rings, or the time is up; take in what there is."""
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        for fd, worker in list(self._open.items()):
            full = self._lines[worker].channel.socket_full
            poll.register(fd, select.POLLIN | (select.POLLOUT if full else 0))
        found = poll.poll(timeout * 1000)
        for fd, _ in found:
            if fd == bell.fileno():
                bell.quiet()
        self._serve([self._open[fd] for fd, _ in found if fd in self._open])

    def close(self) -> None:
        """Close all; what still waits is told."""
        with self._lock:
            for worker in list(self._open.values()):
                self._lose(worker)

    def _serve(self, workers: Sequence[int]) -> None:
        with self._lock, uninterrupted():
            for worker in workers:
                channel = self._lines[worker].channel
                try:
                    while channel.step():
                        pass
                    channel.flush()
                except ConnectionError:
                    self._lose(worker)

    def _lose(self, worker: int) -> None:
        channel = self._lines[worker].channel
        self._open.pop(channel.fd, None)
        channel.close()
        waited, self._waited[worker] = self._waited[worker], {}
        for future in waited.values():
            future.set_exception(ConnectionError("it closed its end of the socket"))  # type: ignore[arg-type]
