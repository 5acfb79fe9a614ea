"""Passes small values between two workers that share no memory: packets one after another on a connection of TCP.

                    sender                                        receiver
        value ──▶ 1 layout, if new        ── LAYOUT ──▶  keeps it under its number
                  2 one packet            ── VALUE ───▶  3 copies the bytes out
                  5 may send as much      ◀── FREED ───  4 every now and then, and in each packet of its own

The threads that compute send and read, so nobody has to be woken on the way. While a worker computes it reads nothing; what
its peer sends stays in the socket. So there are never more bytes under way than ``window``, for which the system has room on
both sides. A value that is larger, or comes when there is no room, is not sent here: the worker has another way for it.
"""

import mmap
import select
import socket
from typing import Any

from pippy.drivers.wire.connection import Receiver
from pippy.drivers.wire.known_layouts import KnownLayout, ReceivedLayouts, SentLayouts
from pippy.drivers.wire.memory import private_memory
from pippy.drivers.wire.packet import FREED, HEADER, LAYOUT, NO_KEY, START, VALUE, write_header
from pippy.drivers.wire.pickling import pickle_to_bytes
from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.value_layout import Parts, aligned, layout_of, rest_to_bytes, take_apart

_LEAST = 1024  # bytes that the system takes for a packet, however small it is


class FarConnection:
    """One end of a connection of TCP, of which each end may have ``window`` bytes under way that the other has not read.

    >>> from pippy.drivers.wire.received_values import ReceivedValues
    >>> import torch
    >>> received = ReceivedValues(), ReceivedValues()
    >>> here, there = (FarConnection(end, values, 1 << 16) for end, values in zip(socket.socketpair(), received))
    >>> here.send((0, 0, 0), torch.ones(2)), here.send((0, 1, 0), torch.ones(1 << 20))
    (8, None)
    >>> there.step()
    True
    >>> received[1].take((0, 0, 0))
    tensor([1., 1.])
    >>> for each in (here, there, *received):
    ...     each.close()
    """

    # what else a transport asks of a connection: nothing ever waits here for room
    queue = ()
    socket_full = False

    def __init__(self, end: socket.socket, receiver: Receiver, window: int, pinned: bool = False) -> None:
        end.setblocking(False)
        self.socket, self.receiver, self.window = end, receiver, window
        self.fd = end.fileno()
        self.ended = False
        self._writable = select.poll()
        self._writable.register(self.fd, select.POLLOUT)
        # to send
        self._packet = private_memory(_whole_pages(window + START))
        self._sent_layouts = SentLayouts(self._packet)
        self._sent = self._freed = 0  # bytes, since the beginning
        # to receive
        self._arrival = private_memory(_whole_pages(2 * window + START))
        self._layouts = ReceivedLayouts(self._arrival, pinned)
        self._begin = self._end = 0  # of what has arrived and is not read
        self._read = self._told = 0  # bytes, since the beginning

    def send(self, key: ValueKey, value: Any) -> int | None:
        """Send a value. Returns the bytes of its tensors; None if it must go another way."""
        parts = take_apart(value)
        known = self._sent_layouts.by_signature.get(parts.signature) or self._introduce(value, parts)
        if known is None:
            return None
        rest = rest_to_bytes(parts.rest) if parts.rest else b""
        size = known.layout.size + len(rest)
        if not self._has_room(size):
            return None
        self._packet.write(START, known.layout, parts.tensors, rest)
        self._send(VALUE, known.number, key, size, len(rest))
        return known.layout.payload

    def step(self) -> bool:
        """Read what is there; False if there is nothing. Raises ConnectionError when the connection is closed or broken."""
        try:
            count = self.socket.recv_into(self._arrival.bytes[self._end :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not count:
            raise ConnectionError("closed")
        self._end += count
        while self._take_packet():
            pass
        self._make_room()
        if 2 * (self._read - self._told) > self.window and not self.ended:
            self._send(FREED, 0, NO_KEY, 0, 0)
        return True

    def flush(self) -> None:
        """Nothing waits here."""

    def discard_before(self, step: int) -> None:
        """Nothing waits here."""

    def trim(self) -> None:
        """Nothing is kept here for larger values."""

    def close(self) -> None:
        """End the connection; the other end sees that. A second call does nothing."""
        self.ended = True
        self.socket.close()

    # -- sending

    def _introduce(self, value: Any, parts: Parts) -> KnownLayout | None:
        """Send a new layout; None if there is no room for it."""
        layout = layout_of(value)
        code = pickle_to_bytes(layout)
        if not self._has_room(len(code)):
            return None
        known = self._sent_layouts.add(parts.signature, layout)
        self._packet.bytes[START : START + len(code)] = code
        self._send(LAYOUT, known.number, NO_KEY, len(code), len(code))
        return known

    def _has_room(self, size: int) -> bool:
        return self._sent + _counted(size) - self._freed <= self.window

    def _send(self, kind: int, number: int, key: ValueKey, size: int, rest: int) -> None:
        write_header(self._packet.bytes, kind, 0, number, rest, key, size, end=self._read)
        self._told = self._read
        if kind != FREED:
            self._sent += _counted(size)
        left = self._packet.bytes[: START + aligned(size)]
        try:
            while left and not self.ended:
                try:
                    left = left[self.socket.send(left) :]
                except (
                    BlockingIOError
                ):  # by the window the system has room; if it disagrees, this waits for the network
                    self._writable.poll(1000)
        except OSError:
            self.ended = True  # what was sent before can still be read; then `step` raises

    # -- receiving

    def _take_packet(self) -> bool:
        """Take the next packet out of what has arrived, if all of it has."""
        start, there = self._begin, self._end - self._begin
        if there < START:
            return False
        kind, _, number, rest, step, value, microbatch, size, freed, _ = HEADER.unpack_from(self._arrival.bytes, start)
        if there < START + aligned(size):
            return False
        self._freed = max(self._freed, freed)
        self._begin += START + aligned(size)
        if kind == FREED:
            return True
        self._read += _counted(size)
        if kind == LAYOUT:
            self._layouts.learn(number, rest, lambda: (self._arrival, start + START))
        elif step >= self.receiver.first_step:
            taken = self._layouts.read(number, rest, lambda: (self._arrival, start + START))
            self.receiver.put((step, value, microbatch), taken)
        return True

    def _make_room(self) -> None:
        """Move what has arrived in part to the beginning, so that there is room for all of it."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin > self.window:
            data = self._arrival.bytes
            self._end -= self._begin
            data[: self._end] = data[self._begin : self._begin + self._end]
            self._begin = 0


def _counted(size: int) -> int:
    """The bytes of the window that a packet takes."""
    return max(_LEAST, START + aligned(size))


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
