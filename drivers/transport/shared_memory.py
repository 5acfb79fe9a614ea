"""Values between the processes of one host, through memory that both ends see. See channel.py for how."""

import os
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

import torch

from pippy.drivers.transport.channel import Channel
from pippy.drivers.transport.interface import Key, Sent
from pippy.drivers.transport.mailbox import Mailbox, MailboxTransport
from pippy.drivers.transport.rpc_transport import copied

_LINE = -1  # the number of what is no peer
_TURN = 64  # packets that one peer may bring in before the others are looked at


class SharedMemoryTransport(MailboxTransport):
    """The transport of one process, ``index``, with a connected socket for each peer.

    The sockets are AF_UNIX and SOCK_SEQPACKET, one pair for each pair of workers, made by their parent. ``limit`` bounds
    the shared memory of each direction (a single value may be larger); what does not fit waits in the sender's own. While
    rings grow, old ones that the receiver has not emptied count beside it, so that twice the limit can be in use.
    Nothing has a name in the file system, so nothing is left behind, however a process ends. The channel of a ``line`` is
    served along with those of the peers. A receive looks for its value for ``patience`` seconds before it sleeps: to wake
    takes longer than a small value's journey, for the sender too.

    >>> first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> here, there = SharedMemoryTransport(0, {1: first}), SharedMemoryTransport(1, {0: second})
    >>> here.send(1, (0, 0, 0), torch.arange(3))
    >>> there.receive((0, 0, 0), source=0)
    tensor([0, 1, 2])
    >>> here.close(), there.close()
    (None, None)
    """

    def __init__(
        self,
        index: int,
        peers: Mapping[int, socket.socket],
        limit: int = 1 << 26,
        device: torch.device | str | None = None,
        line: Channel | None = None,
        patience: float = 0.0,
    ) -> None:
        self.index, self.patience = index, patience
        self.device = torch.device(device) if device is not None else None
        self.sent = {peer: Sent() for peer in peers}
        self.mailbox = Mailbox()
        self.channels = {peer: Channel(end, self.mailbox, limit, self.device) for peer, end in peers.items()}
        if line is not None:
            self.channels[_LINE] = line
        self._peer_of = {channel.fd: peer for peer, channel in self.channels.items()}
        self._epoll = select.epoll()
        self._bell = self.mailbox.bell.fileno()
        self._epoll.register(self._bell, select.EPOLLIN)
        for fd in self._peer_of:
            self._epoll.register(fd, select.EPOLLIN)
        self._waited_for: set[int] = set()  # the sockets whose room to write is waited for

    def send(self, to: int, key: Key, value: Any) -> None:
        if to == self.index:
            self.mailbox.put(key, copied(value))
            return
        channel, sent = self.channels[to], self.sent[to]
        payload = channel.send(key, value)
        sent.values += 1
        sent.bytes += payload

    def receive(self, key: Key, source: int) -> Any:
        box, channel = self.mailbox, self.channels.get(source)
        box.check(key)
        while not box.has(key):
            if channel is not None and channel.fd in self._peer_of and self._step(channel):
                continue
            box.check_source(key, source)
            if self.patience and channel is not None and self._watched(channel):
                continue
            box.waits = key
            try:
                box.check(key)
                self._wait()
                box.check(key)
            finally:
                box.waits = None
        return box.take(key)

    def ready(self, key: Key) -> bool:
        while not self.mailbox.has(key) and self._serve(0):
            pass
        return self.mailbox.has(key)

    def wait_for(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        try:
            while not self._wait(fd):
                pass
        finally:
            self._epoll.unregister(fd)

    def forget(self, below: int) -> None:
        self.mailbox.forget(below)
        for peer in self.sent:  # what a line carries has other numbers
            self.channels[peer].forget(below)

    def close(self) -> None:
        for channel in self.channels.values():
            if not channel.ended:
                channel.flush()
            channel.close()
        self._peer_of.clear()
        self._epoll.close()
        self.mailbox.close()

    def _wait_for_something(self, seconds: float | None) -> None:
        self._serve(-1 if seconds is None else seconds)

    def _wait(self, fd: int = -1) -> bool:
        """Sleep until something happens, and see to it. True if ``fd`` is readable."""
        return self._serve(-1, fd) == fd

    def _serve(self, timeout: float, wanted: int = -1) -> int | None:
        """See to all that is there; ``wanted``, if it is readable, else a number if anything was, else None."""
        self._watch_full_sockets()
        found = None
        for fd, _ in self._epoll.poll(timeout):
            if fd == wanted:
                found = fd
                continue
            found = found if found == wanted else -2
            if fd == self._bell:
                self.mailbox.bell.quiet()
            elif fd in self._peer_of:
                channel = self.channels[self._peer_of[fd]]
                if channel.queue or channel.socket_full:
                    channel.flush()
                for _ in range(_TURN):
                    if not self._step(channel):
                        break
        return found

    def _step(self, channel: Channel) -> bool:
        """Take in one packet, if there is one."""
        try:
            more = channel.step()
            if channel.queue and not channel.socket_full:
                channel.flush()
            return more
        except ConnectionError:
            peer = self._peer_of.pop(channel.fd)
            self._epoll.unregister(channel.fd)
            self._waited_for.discard(channel.fd)
            channel.close()
            self.mailbox.lose(peer)
            return False

    def _watched(self, channel: Channel) -> bool:
        """Whether a packet came from this peer while this thread kept looking."""
        end = time.monotonic() + self.patience
        while channel.fd in self._peer_of and time.monotonic() < end:
            if self._step(channel):
                return True
            os.sched_yield()  # to whoever else has work for this core
        return False

    def _watch_full_sockets(self) -> None:
        full = {fd for fd, peer in self._peer_of.items() if self.channels[peer].socket_full}
        for fd in full ^ self._waited_for:
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if fd in full else 0))
        self._waited_for = full
