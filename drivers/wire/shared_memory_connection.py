"""Passes values between two processes of one host: packets on a socket, and larger bytes in rings of shared memory.

                    sender                                        receiver
        value ──▶ 1 layout, if new        ── LAYOUT ──▶  keeps it under its number
                  2 a place in the ring                  (the ring came as a file descriptor: RING)
                  3 copies the bytes there
                  4 one packet             ── VALUE ───▶  5 copies the bytes out, at once
                  6 frees the place        ◀── FREED ───  if the packet asked; one answer covers all before it

A small value is inside its packet. A value for which the ring has no place goes in memory of its own, whose descriptor
travels beside its packet: the sender may compute for long now, and the receiver must not wait for its next call. Only if
there is no such memory, or the socket is full, the sender keeps a copy of the value in a queue, which it sends, in order,
whenever the connection is served. A socket holds hundreds of packets, and small values leave it room: while many packets
are not read, the bytes of small values go into the ring, too. No call in this file waits.
"""

import errno
import fcntl
import mmap
import os
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from pippy.drivers.wire import packet
from pippy.drivers.wire.memory import Memory, MemoryFile, create_shared, descriptor_beside, map_received, private_memory
from pippy.drivers.wire.pickling import pickle_to_bytes
from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.ring import Ring, ring_size
from pippy.drivers.wire.value_layout import NO_LAYOUT, Parts, ValueLayout, aligned, layout_of, rest_to_bytes, take_apart

_BUFFER = 1 << 20  # what a socket is asked to hold of packets that are not read; the system may allow less
_SMALLEST = 64  # a packet with so few bytes inside takes no more of the socket than one without


@dataclass(slots=True)
class _Outgoing:
    """A value to send, or a layout (its ``rest`` is the pickled layout)."""

    kind: int
    number: int
    key: ValueKey
    layout: ValueLayout
    tensors: list[torch.Tensor]
    rest: bytes
    end: socket.socket | None = None  # the end of a socket to the process ``number``, to hand over

    def own(self) -> "_Outgoing":
        """A copy, in memory of its own."""
        copies = [tensor.detach().clone() for tensor in self.tensors]
        return _Outgoing(self.kind, self.number, self.key, self.layout, copies, self.rest, self.end)

    def write_header(self, target: memoryview, size: int, asks: int = 0, end: int = 0, ring: int = 0) -> None:
        """Write the header of its packet. It has so many bytes, which end at ``end`` in the ring."""
        packet.write_header(target, self.kind, asks, self.number, len(self.rest), self.key, size, end, ring)


class Receiver(Protocol):
    """Takes the values that arrive. Values of steps before ``first_step`` are dropped."""

    first_step: int

    def put(self, key: ValueKey, value: Any) -> None:
        """Keep a value."""


class SharedMemoryConnection:
    """One process's end of its connection with another. ``limit`` bounds the shared memory that it sends through.

    A value may be larger: then its ring is, too, and is kept for the next one. Without ``keeps_larger`` it goes in memory of
    its own.

    >>> from pippy.drivers.wire.received_values import ReceivedValues
    >>> sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> received = ReceivedValues(), ReceivedValues()
    >>> here, there = (SharedMemoryConnection(end, values) for end, values in zip(sockets, received))
    >>> here.send((0, 0, 0), torch.ones(2))
    8
    >>> while there.step(): pass
    >>> received[1].take((0, 0, 0))
    tensor([1., 1.])
    >>> for each in (here, there, *received):
    ...     each.close()
    """

    def __init__(
        self,
        end: socket.socket,
        receiver: Receiver,
        limit: int = 1 << 26,
        pinned: bool = False,
        keeps_larger: bool = True,
    ) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.socket, self.receiver, self.limit = end, receiver, limit
        self.keeps_larger = keeps_larger
        self.fd = end.fileno()
        self.socket_full = self.ended = False
        self.queue: deque[_Outgoing] = deque()
        self.take_end: Callable[[int, int | None], None] | None = None  # for a process whose sockets come this way
        self._sending = False  # to make room is to read, and what is read may be answered: by the queue, for now
        self._packet, self._arrival = (private_memory(mmap.ALLOCATIONGRANULARITY * 2) for _ in range(2))
        self._buffers = [self._arrival.bytes]
        # to send
        self._sent_layouts = packet.SentLayouts(self._packet)
        self._ring: Ring | None = None
        self._out: Memory | None = None
        self._rings_made = 0
        self._holds = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._room = self._holds // 4  # for bytes inside packets, before it is looked how full the socket is
        # to receive
        self._layouts = packet.ReceivedLayouts(self._arrival, pinned)
        self._in: Memory | None = None
        self._rings_received = 0
        self._refused: OSError | None = None  # why the ring was not taken
        self._unanswered: int | None = None  # the position of a FREED that could not be sent, as the socket was full

    # -- sending

    def send(self, key: ValueKey, value: Any) -> int:
        """Send a value, or queue it. Returns the bytes of its tensors."""
        parts = take_apart(value)
        known = self._sent_layouts.by_signature.get(parts.signature) or self._introduce(value, parts)
        if not (self.ended or self._sent_at_once(known, key, parts)):
            rest = rest_to_bytes(parts.rest) if parts.rest else b""
            self._post(_Outgoing(packet.VALUE, known.number, key, known.layout, parts.tensors, rest))
        return known.layout.payload

    def send_end(self, peer: int, end: socket.socket) -> None:
        """Hand over one end of a socket; the process ``peer`` gets the other. It is closed here."""
        if self.ended:
            end.close()
        else:
            self._post(_Outgoing(packet.END, peer, packet.NO_KEY, NO_LAYOUT, [], b"", end))

    def flush(self) -> None:
        """Send as much of the queue as possible."""
        if self._sending:
            return
        self.socket_full = False
        if self._unanswered is not None:
            self._answer(self._unanswered)
        while self.queue and not self.socket_full and self._try(self.queue[0]):
            if self.queue:
                self.queue.popleft()

    def discard_before(self, step: int) -> None:
        """Drop queued values of earlier steps. Layouts stay: later values may need them."""
        self.queue = deque(each for each in self.queue if each.kind != packet.VALUE or each.key[0] >= step)

    def trim(self) -> None:
        """Give up the ring, unless something waits for room in it. The next value that needs one gets a new one."""
        if self._ring is None or self.queue or self.socket_full or self.ended:
            return
        packet.write_header(self._packet.bytes, packet.RING, ring=self._rings_made + 1)
        if self._send():
            self._rings_made += 1
            self._ring = self._out = None

    def close(self) -> None:
        """End the connection; the other end sees that. A second call does nothing."""
        self.ended = True
        self.socket_full = False
        self._clear_queue()
        self.socket.close()
        self._ring = self._out = self._in = None

    def _introduce(self, value: Any, parts: Parts) -> packet.KnownLayout:
        """Send a new layout."""
        layout = layout_of(value)
        code = pickle_to_bytes(layout)
        known = self._sent_layouts.add(parts.signature, layout)
        if not self.ended:
            self._post(_Outgoing(packet.LAYOUT, known.number, packet.NO_KEY, NO_LAYOUT, [], code))
        return known

    def _sent_at_once(self, known: packet.KnownLayout, key: ValueKey, parts: Parts) -> bool:
        """Send a small value inside its packet, if all before it is sent. Most values are sent like this."""
        size = known.layout.size
        if known.place is None or parts.rest or self.queue or self._sending or not self._has_room(size):
            return False
        known.place.write(parts.tensors)
        packet.HEADER.pack_into(self._packet.bytes, 0, packet.VALUE, 0, known.number, 0, *key, size, 0, 0)
        return self._send(packet.START + size)

    def _post(self, outgoing: _Outgoing) -> None:
        if self.queue:
            self.flush()
        if self.queue or self._sending:
            if not self.ended:
                self.queue.append(outgoing.own())
        elif self._try(outgoing):
            if self.queue:
                self.flush()
        elif not self.ended:
            self.queue.appendleft(outgoing.own())  # before those that came while it was tried

    def _try(self, outgoing: _Outgoing) -> bool:
        """Send a value or a layout; False if it must wait."""
        self._sending = True
        try:
            return self._sent(outgoing)
        finally:
            self._sending = False

    def _sent(self, outgoing: _Outgoing) -> bool:
        if outgoing.end is not None:
            return self._send_end(outgoing.number, outgoing.end)
        layout, rest = outgoing.layout, outgoing.rest
        size = layout.size + len(rest)
        if size <= packet.INLINE and self._has_room(size):
            self._packet.write(packet.START, layout, outgoing.tensors, rest)
            outgoing.write_header(self._packet.bytes, size)
            return self._send(packet.START + size)
        if size > self.limit and not self.keeps_larger:
            return self._send_alone(outgoing, size)
        start = self._allocate(aligned(size))
        if start is None or self._ring is None or self._out is None:
            return self._send_alone(outgoing, size)
        ring = self._ring
        self._out.write(start, layout, outgoing.tensors, rest)
        asks = ring.should_ask()
        outgoing.write_header(self._packet.bytes, size, asks, ring.head)
        if not self._send():
            ring.head -= aligned(size)  # given back
            return False
        if asks:
            ring.asked = ring.head
        return True

    def _has_room(self, size: int) -> bool:
        """Whether a packet with so many bytes inside leaves room for others."""
        self._room -= 2 * size + 1024  # no less than the system counts for it
        return self._room >= 0 or size <= _SMALLEST or not self._is_crowded()

    def _is_crowded(self) -> bool:
        """Whether packets that are not read have filled half of the socket."""
        unread: int = struct.unpack("i", fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)))[0]
        if unread <= self._holds // 2:
            self._room = self._holds // 4
        return unread > self._holds // 2

    def _send_alone(self, outgoing: _Outgoing, size: int) -> bool:
        """Send a value in memory of its own, which ends when it is read; False if it must wait."""
        if self.socket_full:
            return False
        try:
            file = MemoryFile.holding(outgoing.layout, outgoing.tensors, outgoing.rest)
        except OSError:
            if size > self.limit and not self.keeps_larger:
                raise
            return False
        outgoing.write_header(self._packet.bytes, size, end=aligned(size), ring=packet.ALONE)
        try:
            return self._send_with(file.fd)
        finally:
            file.close()

    def _send_end(self, peer: int, end: socket.socket) -> bool:
        packet.write_header(self._packet.bytes, packet.END, layout=peer)
        if sent := self._send_with(end.fileno()):
            end.close()
        return sent

    def _send(self, size: int = packet.START) -> bool:
        """Send the packet; False if the socket is full."""
        try:
            self.socket.send(self._packet.bytes[:size])
        except BlockingIOError:
            self.socket_full = True
            return False
        except ConnectionError:
            self._drop_all()
        return True

    def _send_with(self, fd: int) -> bool:
        """Send the packet and a file descriptor; False if the socket is full, or too many descriptors are on their way."""
        try:
            socket.send_fds(self.socket, [self._packet.bytes[: packet.START]], [fd])
        except BlockingIOError:
            self.socket_full = True
            return False
        except ConnectionError:
            self._drop_all()
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            return False
        return True

    def _allocate(self, size: int) -> int | None:
        """The offset of a free place in the ring; None if there is none."""
        start = self._ring.allocate(size) if self._ring else None
        if start is None and self._ring:
            self._read_answers()
            start = self._ring.allocate(size) if self._ring else None
        if start is None and (self._ring is None or self._ring.size < max(size, self.limit)):
            made = self._grow(size)
            start = made.allocate(size) if made else None
        if start is None:
            self._ask()
        return start

    def _read_answers(self) -> None:
        """Read packets here, too: a worker that only sends would not see which places are free again."""
        try:
            while self.step():
                pass
        except ConnectionError:
            pass  # the next step raises it again

    def _grow(self, size: int) -> Ring | None:
        """Make a larger ring, and send it. The receiver empties the old ring before it sees the new one."""
        before = self._ring.size if self._ring else 0
        made = ring_size(size, before, self.limit)
        try:
            fd, memory = create_shared(made)
        except OSError:
            if size > before:
                raise
            self.limit = before
            return None
        packet.write_header(self._packet.bytes, packet.RING, size=made, ring=self._rings_made + 1)
        try:
            if not self._send_with(fd) or self.ended:
                return None
        finally:
            os.close(fd)
        self._rings_made += 1
        self._ring, self._out = Ring(made), memory
        return self._ring

    def _ask(self) -> None:
        """Ask the receiver for a FREED, if none is on its way."""
        ring = self._ring
        if ring is None or self.socket_full or ring.asked == ring.head:
            return
        packet.write_header(self._packet.bytes, packet.ASK, asks=1, end=ring.head)
        if self._send():
            ring.asked = ring.head

    def _drop_all(self) -> None:
        """The other end is closed. Packets that it sent before can still be read."""
        self._clear_queue()
        self.ended = True

    def _clear_queue(self) -> None:
        for each in self.queue:
            if each.end is not None:
                each.end.close()
        self.queue.clear()

    # -- receiving

    def step(self) -> bool:
        """Read one packet; False if there is none. Raises ConnectionError when the other end is closed."""
        try:
            received, ancillary, _, _ = self.socket.recvmsg_into(self._buffers, 64)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # raised once; packets that were sent before can still be read, then comes the end
        if not received:
            raise ConnectionError("closed")
        kind, asks, layout, rest, step, value, microbatch, size, end, ring = packet.HEADER.unpack_from(
            self._arrival.bytes
        )
        wanted = kind == packet.VALUE and step >= self.receiver.first_step
        if wanted and not end:  # it is inside the packet
            self.receiver.put((step, value, microbatch), self._layouts.read(layout, rest, None))
            return True
        taken, alone = None, self._take_alone(ancillary) if ring == packet.ALONE else None
        find = partial(self._bytes_of, size, end, alone) if end else None  # else they are inside the packet
        if wanted:
            taken = self._layouts.read(layout, rest, find)
        elif kind == packet.LAYOUT:
            self._layouts.learn(layout, rest, find)
        elif kind != packet.VALUE:
            self._take_in(kind, layout, size, end, ring, ancillary)
        if isinstance(alone, MemoryFile):
            alone.close()
        if asks:
            self._answer(end)
        if wanted:
            self.receiver.put((step, value, microbatch), taken)  # at the end: it may send, and so read what comes next
        return True

    def _take_in(
        self, kind: int, peer: int, size: int, end: int, ring: int, ancillary: list[tuple[int, int, bytes]]
    ) -> None:
        """Take in a packet that brings neither a value nor a layout."""
        if kind == packet.RING:
            self._take_ring(ancillary, size, ring)
        elif kind == packet.FREED:
            self._freed(end, ring)
        elif kind == packet.END and self.take_end is not None:
            self.take_end(peer, descriptor_beside(ancillary))
        elif kind == packet.REFUSED and ring == self._rings_made:
            self._ring = self._out = None
            self._sent_layouts.by_signature.clear()  # layouts may have been in what was refused

    def _bytes_of(self, size: int, end: int, alone: MemoryFile | OSError | None) -> tuple[packet.Source, int]:
        if alone is not None:
            if isinstance(alone, OSError):
                raise alone
            return alone, 0
        if self._in is None:
            raise self._refused or AssertionError("a value in a ring that never came")
        return self._in, (end - aligned(size)) % self._in.size

    def _take_ring(self, ancillary: list[tuple[int, int, bytes]], size: int, ring: int) -> None:
        self._rings_received, self._unanswered = ring, None
        self._in = self._refused = None
        try:
            self._in = map_received(ancillary) if size else None
        except OSError as error:
            self._refuse(error)

    def _take_alone(self, ancillary: list[tuple[int, int, bytes]]) -> MemoryFile | OSError:
        try:
            return MemoryFile.received(ancillary)
        except OSError as error:
            self._refuse(error)
            return error

    def _refuse(self, error: OSError) -> None:
        """Tell the sender that what it sent could not be taken. Its ring is given up, too: one way out for all cases."""
        self._refused = error
        self._answer(0)

    def _answer(self, end: int) -> None:
        kind = packet.REFUSED if self._refused else packet.FREED
        packet.write_header(self._packet.bytes, kind, end=end, ring=self._rings_received)
        self._unanswered = None if self._send() else end

    def _freed(self, end: int, ring: int) -> None:
        if self._ring and ring == self._rings_made:
            self._ring.free(end)
