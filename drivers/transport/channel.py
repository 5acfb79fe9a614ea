"""What two workers of one host say to each other: packets on a socket, and larger bytes in rings that both can see.

                    sender                                        receiver
        value ──▶ 1 layout, if new        ── LAYOUT ──▶  keeps it under its number
                  2 a place in the ring                  (the ring came as a file descriptor: RING)
                  3 copies the bytes there
                  4 one packet             ── VALUE ───▶  5 copies the bytes out, at once
                  6 frees the place        ◀── FREED ───  if the packet asked; one answer covers all before it

A small value travels inside its packet. What finds no place, or a socket that is full, waits in a queue of the sender, as
a copy of its own, and goes on, in order, whenever the channel gets a turn. Nothing here waits.
"""

import mmap
import os
import socket
from collections import deque
from dataclasses import dataclass
from struct import Struct
from typing import Any, Protocol

import cloudpickle
import torch

from pippy.drivers.transport.interface import Key
from pippy.drivers.transport.layout import Layout, Parts, aligned, layout_of, pickled, take_apart
from pippy.drivers.transport.mailbox import Unreadable
from pippy.drivers.transport.memory import Memory, create_shared, map_shared, private_memory
from pippy.drivers.transport.ring import Ring, ring_size

VALUE, LAYOUT, RING, FREED, ASK = range(5)
_HEAD = Struct(
    "<BBHIqqqqqq"
)  # kind, asks for FREED, layout, bytes of the rest, step, slot, micro-batch, size, end, ring
_START = 64  # of the payload in a packet: the head is shorter, and tensors are aligned
INLINE = 4096  # up to here a packet with the bytes inside is faster than a place in the ring
_LAYOUTS = 1024  # numbers are used again, the oldest first: shapes that never repeat must not fill the memory


@dataclass(slots=True)
class _Record:
    """Something on its way: a value, or a layout (which has its pickled form as ``rest``)."""

    kind: int
    number: int
    key: Key
    layout: Layout
    tensors: list[torch.Tensor]
    rest: bytes

    def own(self) -> "_Record":
        """The same, in memory of its own."""
        copies = [tensor.detach().clone() for tensor in self.tensors]
        return _Record(self.kind, self.number, self.key, self.layout, copies, self.rest)


class Box(Protocol):
    """Where values go that arrive, but for those of steps before ``below``."""

    below: int

    def put(self, key: Key, value: Any) -> None:
        """Keep a value."""


_NO_KEY = (0, 0, 0)
_NOTHING = Layout(None, (), 0, 0)


class Channel:
    """One worker's end of the connection with another.

    >>> from pippy.drivers.transport.mailbox import Mailbox
    >>> ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> boxes = Mailbox(), Mailbox()
    >>> here, there = (Channel(end, box) for end, box in zip(ends, boxes))
    >>> here.send((0, 0, 0), torch.ones(2))
    8
    >>> while there.step(): pass
    >>> boxes[1].take((0, 0, 0))
    tensor([1., 1.])
    >>> for end in (here, there, *boxes):
    ...     end.close()
    """

    def __init__(
        self, end: socket.socket, mailbox: Box, limit: int = 1 << 26, device: torch.device | None = None
    ) -> None:
        end.setblocking(False)
        self.socket, self.mailbox, self.limit, self.device = end, mailbox, limit, device
        self.fd = end.fileno()
        self.socket_full = self.ended = False
        self.queue: deque[_Record] = deque()
        self._packet, self._arrival = (private_memory(mmap.ALLOCATIONGRANULARITY * 2) for _ in range(2))
        self._buffers = [self._arrival.bytes]
        self._numbers: dict[Any, tuple[int, Layout]] = {}
        self._next_number = 0
        self._ring: Ring | None = None
        self._out: Memory | None = None
        self._rings_made = 0
        self._layouts: list[Layout | Unreadable] = [_NOTHING] * _LAYOUTS
        self._in: Memory | None = None
        self._rings_got = 0
        self._owed: int | None = None

    # -- sending

    def send(self, key: Key, value: Any) -> int:
        """Send a value, or queue it. The result is the bytes of its tensors."""
        parts = take_apart(value)
        known = self._numbers.get(parts.signature)
        number, layout = known if known is not None else self._introduce(value, parts)
        if not self.ended:
            self._post(_Record(VALUE, number, key, layout, parts.tensors, pickled(parts.rest) if parts.rest else b""))
        return layout.payload

    def flush(self) -> None:
        """Send what is queued, as far as it goes."""
        self.socket_full = False
        if self._owed is not None:
            self._answer(self._owed)
        while self.queue and not self.socket_full and self._try(self.queue[0]):
            if self.queue:
                self.queue.popleft()

    def forget(self, below: int) -> None:
        """Drop queued values of steps before ``below``. Layouts stay: later values may need them."""
        self.queue = deque(record for record in self.queue if record.kind != VALUE or record.key[0] >= below)

    def close(self) -> None:
        """End the connection; the other end sees that. Idempotent."""
        self.ended = True
        self.socket_full = False
        self.queue.clear()
        self.socket.close()
        self._ring = self._out = self._in = None

    def _introduce(self, value: Any, parts: Parts) -> tuple[int, Layout]:
        number, self._next_number = self._next_number, (self._next_number + 1) % _LAYOUTS
        if len(self._numbers) == _LAYOUTS:
            del self._numbers[next(iter(self._numbers))]
        layout = layout_of(value)
        code = cloudpickle.dumps(layout)
        self._numbers[parts.signature] = number, layout
        if not self.ended:
            self._post(_Record(LAYOUT, number, _NO_KEY, _NOTHING, [], code))
        return number, layout

    def _post(self, record: _Record) -> None:
        if self.queue:
            self.flush()
        if (self.queue or not self._try(record)) and not self.ended:
            self.queue.append(record.own())

    def _try(self, record: _Record) -> bool:
        """Send a record; False if it has to wait."""
        layout, rest = record.layout, len(record.rest)
        size = layout.size + rest
        if size <= INLINE:
            self._packet.write(_START, layout, record.tensors, record.rest)
            return self._head(record.kind, 0, record.number, rest, *record.key, size, 0, 0, inline=size)
        start = self._place(aligned(size))
        if start is None or self._ring is None or self._out is None:
            return False
        ring = self._ring
        self._out.write(start, layout, record.tensors, record.rest)
        asks = ring.should_ask()
        if not self._head(record.kind, asks, record.number, rest, *record.key, size, ring.head, 0):
            ring.head -= aligned(size)  # given back
            return False
        if asks:
            ring.asked = ring.head
        return True

    def _head(self, *fields: int, inline: int = 0) -> bool:
        _HEAD.pack_into(self._packet.bytes, 0, *fields)
        try:
            self.socket.send(self._packet.bytes[: _START + inline])
        except BlockingIOError:
            self.socket_full = True
            return False
        except ConnectionError:
            self._drop_all()
        return True

    def _place(self, size: int) -> int | None:
        """The offset of a place in the ring; None if the record has to wait for one."""
        start = self._ring.place(size) if self._ring else None
        if start is None and self._ring:
            self._read_answers()
            start = self._ring.place(size)
        if start is None and (self._ring is None or size > self._ring.size or self._ring.size < self.limit):
            ring = self._grow(size)
            start = ring.place(size) if ring else None
        if start is None:
            self._ask()
        return start

    def _read_answers(self) -> None:
        """One who only sends gets to know in this way what is free again."""
        try:
            while self.step():
                pass
        except ConnectionError:
            pass  # whoever steps next is told again

    def _grow(self, size: int) -> Ring | None:
        """A new, larger ring, handed over. The receiver empties the old one before it sees the new one."""
        made = ring_size(size, self._ring.size if self._ring else 0, self.limit)
        try:
            fd, memory = create_shared(made)
        except OSError:
            if self._ring is None or size > self._ring.size:
                raise
            self.limit = self._ring.size
            return None
        try:
            _HEAD.pack_into(self._packet.bytes, 0, RING, 0, 0, 0, 0, 0, 0, made, 0, self._rings_made + 1)
            socket.send_fds(self.socket, [self._packet.bytes[:_START]], [fd])
        except BlockingIOError:
            self.socket_full = True
            return None
        except ConnectionError:
            self._drop_all()
            return None
        finally:
            os.close(fd)
        self._rings_made += 1
        self._ring, self._out = Ring(made), memory
        return self._ring

    def _ask(self) -> None:
        ring = self._ring
        if (
            ring
            and not self.socket_full
            and ring.asked != ring.head
            and self._head(ASK, 1, 0, 0, *_NO_KEY, 0, ring.head, 0)
        ):
            ring.asked = ring.head

    def _drop_all(self) -> None:
        """Nobody reads any more. What the other end had sent can still be read."""
        self.queue.clear()
        self.ended = True

    # -- receiving

    def step(self) -> bool:
        """Take in one packet; False if there is none now. Raises ConnectionError when the other end is closed."""
        try:
            size, ancillary, _, _ = self.socket.recvmsg_into(self._buffers, 64)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # said once; what had been sent before can still be read, and then comes the end
        if not size:
            raise ConnectionError("closed")
        kind, asks, number, rest, step, slot, microbatch, payload, end, ring = _HEAD.unpack_from(self._arrival.bytes)
        if kind == VALUE:
            if step >= self.mailbox.below:
                self.mailbox.put((step, slot, microbatch), self._read(number, rest, payload, end))
        elif kind == LAYOUT:
            self._learn(number, rest, payload, end)
        elif kind == RING:
            self._take_ring(ancillary, ring)
        elif kind == FREED:
            self._freed(end, ring)
        if asks:
            self._answer(end)
        return True

    def _bytes_of(self, payload: int, end: int) -> tuple[Memory, int]:
        if payload <= INLINE:
            return self._arrival, _START
        assert self._in is not None
        return self._in, (end - aligned(payload)) % self._in.size

    def _read(self, number: int, rest: int, payload: int, end: int) -> Any:
        layout = self._layouts[number]
        if isinstance(layout, Unreadable):
            return layout
        memory, start = self._bytes_of(payload, end)
        try:
            return memory.read(start, layout, rest, self.device)
        except Exception as error:  # it belongs to whoever takes this value, not to whoever waits for another
            return Unreadable(error)

    def _learn(self, number: int, rest: int, payload: int, end: int) -> None:
        memory, start = self._bytes_of(payload, end)
        try:
            self._layouts[number] = cloudpickle.loads(memory.bytes[start : start + rest])
        except Exception as error:  # as in _read
            self._layouts[number] = Unreadable(error)

    def _take_ring(self, ancillary: list[tuple[int, int, bytes]], ring: int) -> None:
        fd = int.from_bytes(ancillary[0][2][:4], "little", signed=True)
        try:
            self._in, self._rings_got, self._owed = map_shared(fd), ring, None
        finally:
            os.close(fd)

    def _answer(self, end: int) -> None:
        self._owed = None if self._head(FREED, 0, 0, 0, *_NO_KEY, 0, end, self._rings_got) else end

    def _freed(self, end: int, ring: int) -> None:
        if self._ring and ring == self._rings_made:
            self._ring.free(end)
