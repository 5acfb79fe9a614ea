"""The layouts that both ends of a connection know under numbers, so that each is sent once."""

import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from pippy.drivers.wire.memory import Memory, Place
from pippy.drivers.wire.packet import INLINE, START
from pippy.drivers.wire.received_values import Unreadable
from pippy.drivers.wire.value_layout import NO_LAYOUT, ValueLayout

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
