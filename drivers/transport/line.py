"""Numbered messages between the controller and a worker of its host, by the memory and the sockets of channel.py."""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from pippy.drivers.transport import wire
from pippy.drivers.transport.channel import Channel
from pippy.drivers.transport.inbox import Inbox
from pippy.drivers.transport.wire import Packed

LARGE = 1 << 24  # a ring that has grown stays: what has more bytes than this had better go another way


class Line:
    """One end. What arrives is handed to ``take`` with its number; a message that could not be read is an exception.

    >>> from pippy.drivers.transport.wire import pack, unpack
    >>> ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> here, there = (Line(end, lambda number, packed: print(number, unpack(packed))) for end in ends)
    >>> here.send(7, pack("a message"))
    >>> while there.channel.step(): pass
    7 a message
    >>> here.channel.close(), there.channel.close()
    (None, None)
    """

    below = 0  # nothing is dropped

    def __init__(self, end: socket.socket, take: Callable[[int, Packed], None]) -> None:
        self.take = take
        self.channel = Channel(end, self, limit=2 * LARGE)

    def send(self, number: int, packed: Packed) -> None:
        """Send a message. What finds no room now waits in this process, until the channel gets a turn."""
        self.channel.send((number, 0, 0), packed)

    def put(self, key: tuple[int, int, int], value: Any) -> None:
        """For the channel: a message has arrived."""
        self.take(key[0], value)


class Answering(Line):
    """A worker's end: messages go to its inbox, and answers back under their numbers. ``large`` carries the large ones.

    >>> ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> here, inbox = Line(ends[0], lambda number, packed: print(number, wire.unpack(packed))), Inbox()
    >>> there = Answering(ends[1], inbox, large=print)
    >>> here.send(0, wire.pack("a message"))
    >>> while there.channel.step(): pass
    >>> delivery = inbox.get()
    >>> delivery.reply(f"{delivery.message} is answered")
    >>> while here.channel.step(): pass
    0 a message is answered
    >>> here.channel.close(), there.channel.close(), inbox.close()
    (None, None, None)
    """

    def __init__(self, end: socket.socket, inbox: Inbox, large: Callable[[int, Packed], None]) -> None:
        super().__init__(end, lambda number, packed: wire.put(inbox, number, packed, partial(self._answer, number)))
        self._large = large

    def _answer(self, number: int, packed: Packed) -> None:
        if wire.size(packed) > LARGE:
            self._large(number, packed)
        else:
            self.send(number, packed)
