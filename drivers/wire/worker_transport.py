"""Sends values to each peer in the way that there is: through shared memory, over TCP, or by calls of a function.

shared_memory_connection.py explains the first way, tcp_connection.py the second. The function is torch's RPC; between threads
of a process it puts the value where it belongs. Which peers are near is settled before the first value is sent.
"""

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from pippy.drivers.base.host_errors import no_descriptor
from pippy.drivers.wire.received_values import ReceivedValues, ValueKey
from pippy.drivers.wire.shared_memory_connection import SharedMemoryConnection
from pippy.drivers.wire.tcp_connection import TcpConnection
from pippy.drivers.wire.transport import Post, SentCount, Transport
from pippy.drivers.wire.value_layout import copied, layout_of

_CONTROLLER = -1  # its number among the peers
_EVENTS = 16  # so many are taken at once; Python allocates room for 1023 in each call otherwise
_TURN = 64  # so many packets of one peer are read before those of the next


class WorkerTransport(Transport):
    """The transport of one worker, ``index``, with a connected socket for each peer of its host.

    The sockets are AF_UNIX and SOCK_SEQPACKET, one pair for each pair of workers that pass values. ``peers`` has some; others
    come from the controller, before the first message that needs them, or `add_near` brings them. ``limit`` bounds the shared
    memory that is kept for each direction (a single value may be larger); values for which it has no room are in memory of
    their own until they are read. While a ring is replaced, the old ring that the receiver has not emptied is in use too.
    The memory has no name in the file system, so nothing is left behind, however a process ends.

    To peers which share no memory with this process, values go by a connection of TCP: `add_far` brings it, and ``lost`` is
    called if it breaks. To those that are ``far`` and have none ``post(to, key, value)`` carries them, and at its end
    ``deliver`` is called. It gets a copy on the CPU that nobody changes, and must not wait for the receiver.

    A connection to the ``controller`` is served along with those of the peers. A receive polls for its value for
    ``patience`` seconds before it sleeps, because waking a process takes longer than sending it a small value. If values go on
    to a device, they are put into ``pinned`` memory.

    >>> import torch
    >>> first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> here, there = WorkerTransport(0, {1: first}), WorkerTransport(1, {0: second})
    >>> here.send(1, (0, 0, 0), torch.arange(3))
    >>> there.receive((0, 0, 0), source=0)
    tensor([0, 1, 2])
    >>> here.close(), there.close()
    (None, None)
    """

    def __init__(
        self,
        index: int,
        peers: Mapping[int, socket.socket] = {},
        limit: int = 1 << 26,
        pinned: bool = False,
        controller: SharedMemoryConnection | None = None,
        patience: float = 0.0,
        far: Collection[int] = (),
        post: Post | None = None,
        lost: Callable[[int, str], None] = lambda peer, how: None,
    ) -> None:
        self.index, self.far = index, frozenset(far)
        self.patience = 0.0 if pinned else patience  # a copy that has left the device must not wait for a poll
        self.sent: dict[int, SentCount] = {}
        self.received, self._limit = ReceivedValues(), limit
        self._post, self._lost = post, lost
        self.far_connections: dict[int, TcpConnection] = {}
        self._brought: deque[tuple[int, socket.socket]] = deque()  # the sockets that other threads have for this one
        self._closed = False
        self._pinned = pinned
        self.connections: dict[int, SharedMemoryConnection] = {}
        self._peer_of: dict[int, int] = {}
        self._unconnected: dict[int, OSError] = {}  # the peers whose sockets could not be taken
        self._epoll = select.epoll()
        self._wakeup = self.received.wakeup.fileno()
        self._epoll.register(self._wakeup, select.EPOLLIN)
        if controller is not None:
            controller.take_end = self._take_end
            self._add(_CONTROLLER, controller)
        for peer, end in peers.items():
            self._connect(peer, end)
        self._full: set[int] = set()  # the sockets that epoll watches for room to write

    def send(self, to: int, key: ValueKey, value: Any) -> None:
        connection = self.connections.get(to)
        if connection is None:
            if to == self.index:
                self.received.put(key, copied(value))
                return
            connection = None if to in self.far else self._await_connection(key, to)
            if connection is None:
                self._send_far(to, key, value, self.sent.setdefault(to, SentCount()))
                return
        payload = connection.send(key, value)
        sent = self.sent[to]
        sent.values += 1
        sent.bytes += payload

    def add_far(self, peer: int, end: socket.socket) -> None:
        """Use a connection of TCP to a far peer. From any thread."""
        connection = self.far_connections[peer] = TcpConnection(end, self.received, partial(self._broke, peer))
        self.received.wakeup.set()  # a send may wait for it
        if self._closed:
            connection.close()

    def add_near(self, peer: int, end: socket.socket) -> None:
        """Use a socket to a peer of this host. From any thread."""
        self._brought.append((peer, end))
        self.received.wakeup.set()

    def ready(self, key: ValueKey) -> bool:
        while not self.received.has(key) and self._serve(0):
            pass
        return self.received.has(key)

    def wait_for(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        try:
            while self._serve(-1, fd) != fd:
                pass
        finally:
            self._epoll.unregister(fd)

    def discard_before(self, step: int) -> None:
        self.received.discard_before(step)
        for connection in self._to_peers():  # not to the controller, whose messages have other numbers
            connection.discard_before(step)

    def trim(self) -> None:
        for connection in self._to_peers():
            connection.trim()

    def forget(self, peers: Collection[int]) -> None:
        self._take_brought()
        for peer in peers:
            self._unconnected.pop(peer, None)
            far = self.far_connections.pop(peer, None)
            if far is not None:
                self.sent.pop(peer, None)
                far.close()
            connection = self.connections.pop(peer, None)
            if connection is not None:
                del self.sent[peer]
                if self._peer_of.get(connection.fd) == peer:  # else it is closed, and the number may be another's
                    del self._peer_of[connection.fd]
                    self._epoll.unregister(connection.fd)
                    self._full.discard(connection.fd)
                connection.close()
        super().forget(peers)

    def close(self) -> None:
        self._closed = True
        for far in list(self.far_connections.values()):
            far.close()
        for connection in self.connections.values():
            if not connection.ended:
                connection.flush()
            connection.close()
        self._peer_of.clear()
        self._epoll.close()
        self.received.close()

    def _to_peers(self) -> Iterator[SharedMemoryConnection]:
        return (connection for peer, connection in self.connections.items() if peer != _CONTROLLER)

    def _take_in(self, source: int) -> bool:
        connection = self.connections.get(source)
        if source in self._unconnected:
            raise self._unconnected[source]
        if connection is None or connection.fd not in self._peer_of:
            return False
        return self._step(connection) or (self.patience > 0 and self._poll(connection))

    def _send_far(self, to: int, key: ValueKey, value: Any, sent: SentCount) -> None:
        connection = self.far_connections.get(to)
        sent.values += 1
        if connection is not None and not connection.ended:
            sent.bytes += connection.send(key, value)
            return
        layout = layout_of(value)
        sent.bytes += layout.payload
        if to in self.far and not self.received.is_lost(to):
            assert self._post is not None, f"worker {to} is far, and nothing carries values there"
            self._post(to, key, copied(value, layout))

    def _broke(self, peer: int, how: str) -> None:
        """A connection of TCP has broken. From the thread that reads it."""
        self._lost(peer, f"the connection to it broke: {how}")
        self.received.mark_lost(peer)

    def _add(self, peer: int, connection: SharedMemoryConnection) -> None:
        self.connections[peer] = connection
        self._peer_of[connection.fd] = peer
        self._epoll.register(connection.fd, select.EPOLLIN)

    def _connect(self, peer: int, end: socket.socket) -> None:
        self._add(peer, SharedMemoryConnection(end, self.received, self._limit, self._pinned))
        self.sent[peer] = SentCount()

    def _take_end(self, peer: int, fd: int | None) -> None:
        """Take the socket to a peer that the controller has sent."""
        if fd is None:
            self._unconnected[peer] = no_descriptor(f"the socket to worker {peer}")
        else:
            self._use(peer, socket.socket(fileno=fd))

    def _use(self, peer: int, end: socket.socket) -> None:
        if peer in self.connections:  # it was not known whether the first would come; both workers keep that
            end.close()
        else:
            self._connect(peer, end)

    def _take_brought(self) -> None:
        while self._brought:
            self._use(*self._brought.popleft())

    def _await_connection(self, key: ValueKey, peer: int) -> SharedMemoryConnection | None:
        """Wait for what connects this worker with a peer: it is on its way since before the message of this command.

        None if that is a connection of TCP.
        """
        while peer not in self.connections and peer not in self.far_connections:
            if peer in self._unconnected:
                raise self._unconnected[peer]
            self.received.check(key)
            self._serve(-1)
        return self.connections.get(peer)

    def _wait_for_traffic(self, seconds: float | None) -> None:
        self._serve(-1 if seconds is None else seconds)

    def _serve(self, timeout: float, wanted: int = -1) -> int | None:
        """Serve all readable sockets. Returns ``wanted`` if it is readable, else -2 if another one was, else None."""
        self._watch_full_sockets()
        found = None
        for fd, _ in self._epoll.poll(timeout, _EVENTS):
            if fd == wanted:
                found = fd
                continue
            found = found if found == wanted else -2
            if fd == self._wakeup:
                self.received.woken()
                self._take_brought()
            elif fd in self._peer_of:
                connection = self.connections[self._peer_of[fd]]
                if connection.queue or connection.socket_full:
                    connection.flush()
                for _ in range(_TURN):
                    if not self._step(connection) or self.received.has_awaited():
                        break  # nothing more is there; or it is what is waited for, and epoll tells of the rest again
        return found

    def _step(self, connection: SharedMemoryConnection) -> bool:
        """Read one packet, if there is one."""
        try:
            more = connection.step()
            if connection.queue and not connection.socket_full:
                connection.flush()
            return more
        except ConnectionError:
            peer = self._peer_of.pop(connection.fd)
            self._epoll.unregister(connection.fd)
            self._full.discard(connection.fd)
            connection.close()
            self.received.mark_lost(peer)
            return False

    def _poll(self, connection: SharedMemoryConnection) -> bool:
        """Poll for a packet of this peer for ``patience`` seconds; True if one came."""
        end = time.monotonic() + self.patience
        while connection.fd in self._peer_of and time.monotonic() < end:
            if self._step(connection):
                return True
            os.sched_yield()  # to other processes on this core
        return False

    def _watch_full_sockets(self) -> None:
        full = {fd for fd, peer in self._peer_of.items() if self.connections[peer].socket_full}
        for fd in full ^ self._full:
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if fd in full else 0))
        self._full = full


def in_process(workers: int) -> list[Transport]:
    """The transports of so many workers; each is for a thread of its own.

    >>> import torch
    >>> first, second = in_process(2)
    >>> first.send(1, (0, 0, 0), torch.ones(1))
    >>> second.ready((0, 0, 0))
    True
    """
    transports: list[Transport] = []

    def post(to: int, key: ValueKey, value: Any) -> None:
        transports[to].deliver(key, value)

    transports.extend(WorkerTransport(index, far=range(workers), post=post) for index in range(workers))
    return transports
