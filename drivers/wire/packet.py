"""The packets that the two ends of a connection send to each other, and the header of a packet.

    bytes  field     VALUE: a value      LAYOUT: of later      RING: new shared     FREED: what is     ASK: send
                                         values                memory               free again         FREED
    -----  --------  ------------------  --------------------  -------------------  -----------------  ---------
    0      kind      0                   1                     2                    3                  4
    1      asks      1: send FREED       1: send FREED         -                    -                  1
    2      layout    its layout          the number it gets    -                    -                  -
    4      rest      bytes that are      bytes that are        -                    -                  -
                     no tensor's         pickled
    8      step          16     value      > its key          -                     -                    -                  -
    24     microbatch/
    32     size      all of its bytes    all of its bytes      bytes of the ring    -                  -
    40     end       where they end      where they end        -                    up to here         up to here
                     in the ring         in the ring
    48     ring      0, or ALONE         0, or ALONE           its number           of which ring      -

A field that a kind does not use is 0. Positions in a ring only grow (see ring.py). The bytes of a value or a layout are

- in the packet itself, behind the header, at ``START``: at most ``INLINE`` bytes; ``end`` is 0 then;
- in the ring;
- ``ALONE``, in memory of their own, whose file descriptor travels beside the packet.

The file descriptor of a new ring travels beside its packet, too. A ring of 0 bytes has none: the last one is to be given
up. A process that has no free descriptor for what came answers REFUSED (5), with the number of the ring that it was sent
last: the sender is to make another ring, and to send its layouts again. END (6) has one end of a socket beside it, whose
other end the process with the number ``layout`` gets.

`KnownLayouts` are the layouts that both ends of a connection know under numbers, so that each is sent once.
"""

import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from struct import Struct
from typing import Any, Protocol

from pippy.drivers.wire.memory import Memory, Place
from pippy.drivers.wire.received_values import Unreadable
from pippy.drivers.wire.value_layout import NO_LAYOUT, ValueLayout

VALUE, LAYOUT, RING, FREED, ASK, REFUSED, END = range(7)
HEADER = Struct("<BBHIqqqqqq")
NO_KEY = (0, 0, 0)
START = 64  # the header is shorter, and tensors are aligned
ALONE = -1
INLINE = 4096  # up to this size, a packet with the bytes inside is faster than a place in the ring


def write_header(
    packet: memoryview,
    kind: int,
    asks: int = 0,
    layout: int = 0,
    rest: int = 0,
    key: tuple[int, int, int] = NO_KEY,
    size: int = 0,
    end: int = 0,
    ring: int = 0,
) -> None:
    """Write the header of a packet.

    >>> packet = memoryview(bytearray(START))
    >>> write_header(packet, VALUE, layout=7, key=(1, 2, 3), size=8)
    >>> HEADER.unpack_from(packet)
    (0, 0, 7, 0, 1, 2, 3, 8, 0, 0)
    """
    HEADER.pack_into(packet, 0, kind, asks, layout, rest, *key, size, end, ring)


LAYOUTS = 1024  # numbers are used again, the oldest first, so that shapes that never repeat do not fill the memory


class Source(Protocol):
    """Bytes from which a value is read: `Memory`, or a `MemoryFile`."""

    def read(self, start: int, layout: ValueLayout, rest: int, pinned: bool) -> Any:
        """The value at ``start``."""

    def part(self, start: int, size: int) -> memoryview:
        """So many of the bytes."""


Find = Callable[[], tuple[Source, int]]  # where the bytes of a value are; raises if they are nowhere


@dataclass(slots=True)
class KnownLayout:
    """A layout that both ends have, under a number; and where its tensors lie in a packet, if they fit in there."""

    number: int
    layout: ValueLayout
    place: Place | None

    @classmethod
    def of(cls, number: int, layout: ValueLayout, packet: Memory | None) -> "KnownLayout":
        """The layout in the packets that go by this memory, if there is one."""
        return cls(number, layout, packet.place(START, layout) if packet and layout.size <= INLINE else None)


class SentLayouts:
    """The layouts that the other end has, ``by_signature`` of their values. Small values go by the memory ``packet``.

    >>> from pippy.drivers.wire.memory import private_memory
    >>> from pippy.drivers.wire.value_layout import layout_of
    >>> layouts, value = SentLayouts(private_memory(1 << 13)), (True, "a")
    >>> layouts.add("its signature", layout_of(value)).number, layouts.add("another", layout_of(None)).number
    (0, 1)
    >>> layouts.by_signature["its signature"].layout.size
    0
    """

    def __init__(self, packet: Memory) -> None:
        self.by_signature: dict[Hashable, KnownLayout] = {}
        self._packet, self._next = packet, 0

    def add(self, signature: Hashable, layout: ValueLayout) -> KnownLayout:
        """Number a layout that is to be sent. With all numbers in use, the oldest layout is forgotten."""
        number, self._next = self._next, (self._next + 1) % LAYOUTS
        if len(self.by_signature) == LAYOUTS:
            del self.by_signature[next(iter(self.by_signature))]
        known = self.by_signature[signature] = KnownLayout.of(number, layout, self._packet)
        return known


class ReceivedLayouts:
    """The layouts that have come, by their numbers. Values that are not found elsewhere are in the memory ``packet``, at START.

    What cannot be read is Unreadable: the receive of that value raises the error, and not one of another value.

    >>> from pippy.drivers.wire.memory import private_memory
    >>> packet = private_memory(1 << 13)
    >>> packet.bytes[START : START + 4] = b"None"
    >>> layouts = ReceivedLayouts(packet, pinned=False)
    >>> layouts.learn(0, 4, None)
    >>> type(layouts.read(0, 0, None).error).__name__
    'UnpicklingError'
    """

    def __init__(self, packet: Memory | None = None, pinned: bool = False) -> None:
        self.packet, self.pinned = packet, pinned
        self._known: list[KnownLayout | Unreadable] = [KnownLayout(0, NO_LAYOUT, None)] * LAYOUTS

    def learn(self, number: int, size: int, find: Find | None) -> None:
        """Take in a layout, pickled in so many bytes; without ``find``, in the packet."""
        try:
            source, start = find() if find else self._inside()
            self._known[number] = KnownLayout.of(number, pickle.loads(source.part(start, size)), self.packet)
        except Exception as error:
            self._known[number] = Unreadable(error)

    def read(self, number: int, rest: int, find: Find | None) -> Any:
        """A value with the layout of this number, of which the last ``rest`` bytes are those of its other leaves."""
        known = self._known[number]
        if isinstance(known, Unreadable):
            return known
        try:
            if find is None and known.place is not None and not self.pinned:
                return known.place.read(rest)
            source, start = find() if find else self._inside()
            return source.read(start, known.layout, rest, self.pinned)
        except Exception as error:
            return Unreadable(error)

    def _inside(self) -> tuple[Source, int]:
        assert self.packet is not None, "a value that nothing finds"
        return self.packet, START
