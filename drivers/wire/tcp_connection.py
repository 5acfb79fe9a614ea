"""Passes values between two workers that share no memory: packets one after another on a connection of TCP.

                    sender                                        receiver
        value ──▶ 1 layout, if new        ── LAYOUT ──▶  keeps it under its number
                  2 one packet            ── VALUE ───▶  3 copies the bytes out, at once

The thread that computes sends what the socket takes, which is all of a small value; another thread sends the rest. What comes
is read by a thread, whatever the worker does, so a large value arrives while both workers compute.
"""

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

from pippy.drivers.wire import packet
from pippy.drivers.wire.memory import CopiedBytes, Memory, private_memory
from pippy.drivers.wire.pickling import pickle_to_bytes
from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.value_layout import NO_LAYOUT, Parts, ValueLayout, aligned, layout_of, rest_to_bytes, take_apart

_SMALL = 1 << 16  # bytes of a packet that goes through memory that is kept; a larger one has memory of its own


class Taker(Protocol):
    """Takes what arrives, on the thread that reads the connection."""

    def deliver(self, key: ValueKey, value: Any) -> None:
        """Take a value."""


class TcpConnection:
    """One end of a connection. What arrives goes to ``received``; when it breaks, ``broke`` is called, once, with the reason.

    >>> import select
    >>> from pippy.drivers.wire.received_values import ReceivedValues
    >>> received = ReceivedValues(), ReceivedValues()
    >>> here, there = (TcpConnection(end, values, [].append) for end, values in zip(socket.socketpair(), received))
    >>> here.send((0, 0, 0), torch.ones(2))
    8
    >>> while not received[1].has((0, 0, 0)):
    ...     _ = select.select([received[1].wakeup], [], [])
    >>> received[1].take((0, 0, 0))
    tensor([1., 1.])
    >>> for each in (here, there, *received):
    ...     each.close()
    """

    def __init__(self, end: socket.socket, received: Taker, broke: Callable[[str], None]) -> None:
        end.setblocking(True)  # for the threads; the sends of the one that computes do not wait
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.received, self.broke = end, received, broke
        self.ended = self._closed = False
        self._failure = ""  # of a send, which says more than the end that the reader sees then
        # to send
        self._packet = private_memory(packet.START + _SMALL)
        self._sent_layouts = packet.SentLayouts(self._packet)
        self._unsent: deque[memoryview] = deque()  # the first is being sent
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        # to receive
        self._header, self._stream = memoryview(bytearray(packet.START)), _Stream(end)
        self._layouts = packet.ReceivedLayouts()
        self._reader = threading.Thread(target=self._read_all, name="pippy values in", daemon=True)
        self._reader.start()

    def send(self, key: ValueKey, value: Any) -> int:
        """Send a value. Returns the bytes of its tensors."""
        parts = take_apart(value)
        known = self._sent_layouts.by_signature.get(parts.signature) or self._introduce(value, parts)
        rest = rest_to_bytes(parts.rest) if parts.rest else b""
        self._send(packet.VALUE, known.number, key, known.layout, parts.tensors, rest)
        return known.layout.payload

    def close(self) -> None:
        """End the connection; the other end sees that. A second call does nothing."""
        self._closed = True
        self._stop_sending()
        with suppress(OSError):  # it is not connected any more
            self.socket.shutdown(socket.SHUT_RDWR)  # a thread that waits for it returns
        self.socket.close()

    # -- sending

    def _introduce(self, value: Any, parts: Parts) -> packet.KnownLayout:
        """Send a new layout."""
        known = self._sent_layouts.add(parts.signature, layout_of(value))
        self._send(packet.LAYOUT, known.number, packet.NO_KEY, NO_LAYOUT, [], pickle_to_bytes(known.layout))
        return known

    def _send(
        self, kind: int, number: int, key: ValueKey, layout: ValueLayout, tensors: list[torch.Tensor], rest: bytes
    ) -> None:
        if self.ended:
            return
        size = layout.size + len(rest)
        memory = self._packet if size <= _SMALL and not self._unsent else _memory(packet.START + aligned(size))
        memory.write(packet.START, layout, tensors, rest)
        packet.write_header(memory.bytes, kind, 0, number, len(rest), key, size)
        left = memory.bytes[: packet.START + aligned(size)]
        if not self._unsent:
            left = left[self._sent_now(left) :]
        if left and not self.ended:
            self._leave_to_writer(left)  # until that is sent, other values have memory of their own

    def _sent_now(self, data: memoryview) -> int:
        """Send what the socket has room for. Returns how many bytes that were."""
        try:
            return self.socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._failure = str(error)
            self._stop_sending()
            return 0

    def _leave_to_writer(self, data: memoryview) -> None:
        with self._changed:
            self._unsent.append(data)
            self._changed.notify()
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="pippy values out", daemon=True)
            self._writer.start()

    def _write_all(self) -> None:
        try:
            while (data := self._first_unsent()) is not None:
                self.socket.sendall(data)
                with self._changed:
                    if self._unsent:
                        self._unsent.popleft()
        except OSError as error:
            self._failure = str(error)
            self._stop_sending()

    def _first_unsent(self) -> memoryview | None:
        """Wait for something to send; None at the end."""
        with self._changed:
            while not self._unsent and not self.ended:
                self._changed.wait()
            return None if self.ended else self._unsent[0]

    def _stop_sending(self) -> None:
        """Drop what is not sent. Packets that the other end sent before can still be read."""
        with self._changed:
            self.ended = True
            self._unsent.clear()
            self._changed.notify()

    # -- receiving

    def _read_all(self) -> None:
        try:
            while True:
                self._read_packet()
        except OSError as error:
            how = str(error)
        except MemoryError as error:
            how = f"there is no memory for what came: {error}"
        if not self._closed:
            self._stop_sending()
            self.broke(self._failure or how)

    def _read_packet(self) -> None:
        self._stream.read_into(self._header)
        kind, _, number, rest, step, value, microbatch, size, *_ = packet.HEADER.unpack_from(self._header)
        body = _Body(self._stream, aligned(size))
        if kind == packet.LAYOUT:
            self._layouts.learn(number, rest, lambda: (body, 0))
        taken = self._layouts.read(number, rest, lambda: (body, 0)) if kind == packet.VALUE else None
        body.skip_to(body.size)
        if kind == packet.VALUE:
            self.received.deliver((step, value, microbatch), taken)


class _Stream:
    """What comes through a socket, in order. Little is read from the system at a time, unless much is wanted."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._buffer = end, memoryview(bytearray(_SMALL))
        self._begin = self._end = 0  # of what is in the buffer

    def read_into(self, target: memoryview) -> None:
        """Wait for so many bytes. Raises OSError if they do not come."""
        while target:
            if self._begin < self._end:
                count = min(len(target), self._end - self._begin)
                target[:count] = self._buffer[self._begin : self._begin + count]
                self._begin += count
                target = target[count:]
            elif len(target) >= len(self._buffer):
                target = target[self._received(target) :]
            else:
                self._begin, self._end = 0, self._received(self._buffer)

    def _received(self, target: memoryview) -> int:
        count = self._socket.recv_into(target)
        if not count:
            raise ConnectionError("closed")
        return count


class _Body(CopiedBytes):
    """The bytes of one packet in a stream. They are read in their order."""

    def __init__(self, stream: _Stream, size: int) -> None:
        self.size, self._stream, self._read_so_far = size, stream, 0

    def skip_to(self, start: int) -> None:
        """Pass over the bytes before ``start``."""
        if start > self._read_so_far:
            self._stream.read_into(memoryview(bytearray(start - self._read_so_far)))
            self._read_so_far = start

    def _read(self, target: memoryview, start: int) -> None:
        self.skip_to(start)
        self._stream.read_into(target)
        self._read_so_far += len(target)


def _memory(size: int) -> Memory:
    """New memory, without numbers."""
    return Memory(memoryview(torch.empty(size, dtype=torch.uint8).numpy()))  # type: ignore[arg-type]
