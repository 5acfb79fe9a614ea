"""How two workers of different hosts get a connection of TCP: one opens a door for the other alone, and closes it behind it.

    worker 2   opens a port, and tells worker 1, by RPC, where it is and two secrets of 32 random bytes
    worker 1   connects, and says the first secret and the window that it can have
    worker 2   says the second secret, and its own window
    worker 1   says that it takes the connection
    worker 2   closes the port, and takes the connection, too
    both       take the smaller window

A guest may have given up meanwhile. Then the host has no connection, either, and each sends its values in another way.

Whoever else connects does not know the first secret, is sent nothing, and nothing of what it sends is read beyond 36 bytes.
Whoever else answers does not know the second. The secrets are never written into a store. They go through RPC, so these
connections are worth as much trust as those of RPC, and no more.
"""

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pippy.drivers.wire.messages.silent_connections import break_when_silent

_BUFFER = 1 << 20  # what a socket is asked to hold each way; the system may allow less
_SECRET = 32
_WINDOW = struct.Struct("<I")
_TAKEN = b"+"

Take = Callable[[socket.socket, int], None]  # gets a connection, and its window


@dataclass(frozen=True)
class Invitation:
    """Where a door is, and what the two ends say there.

    >>> Invitation("10.0.0.2", 40000, b"first", b"second")
    Invitation(address='10.0.0.2', port=40000)
    """

    address: str
    port: int
    first: bytes = field(repr=False)
    second: bytes = field(repr=False)


def open_door(address: str, take: Take, within: float, silence: float) -> Invitation:
    """Open a port at an address of this host, and hand the connection of the invited to ``take``, on another thread.

    The port is open until then, or for ``within`` seconds. A connection that is silent for ``silence`` seconds breaks.

    >>> import queue
    >>> taken = queue.SimpleQueue()
    >>> invitation = open_door("127.0.0.1", lambda end, window: taken.put(end), 5.0, 5.0)
    >>> guest, window = come_in(invitation, 5.0, 5.0)
    >>> host = taken.get()
    >>> host.sendall(b"hello"), guest.recv(5)
    (None, b'hello')
    >>> guest.close(), host.close()
    (None, None)
    """
    door = socket_for(address)
    try:
        _enlarge(door)
        door.bind((address, 0))
        door.listen(1)
        invitation = Invitation(address, door.getsockname()[1], os.urandom(_SECRET), os.urandom(_SECRET))
        waiting = _let_in, (door, invitation, take, time.monotonic() + within, silence)
        threading.Thread(target=waiting[0], args=waiting[1], name="pippy door", daemon=True).start()
    except BaseException:
        door.close()
        raise
    return invitation


def come_in(invitation: Invitation, within: float, silence: float) -> tuple[socket.socket, int]:
    """Go to a door. Returns the connection and its window. Raises OSError if that cannot be had in so many seconds."""
    end = socket_for(invitation.address)
    try:
        _enlarge(end)
        end.settimeout(within)
        end.connect((invitation.address, invitation.port))
        _prepare(end, silence)
        own = _window(end)
        end.sendall(invitation.first + _WINDOW.pack(own))
        said = _read(end, _SECRET + _WINDOW.size, time.monotonic() + within)
        if not hmac.compare_digest(said[:_SECRET], invitation.second):
            raise ConnectionError("another program answers at the port that was opened for this connection")
        end.sendall(_TAKEN)
        return end, min(own, *_WINDOW.unpack(said[_SECRET:]))
    except BaseException:
        end.close()
        raise


def socket_for(address: str) -> socket.socket:
    """A socket of TCP that can have an address of this version.

    >>> with socket_for("::1") as end:
    ...     end.family.name
    'AF_INET6'
    """
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


def _let_in(door: socket.socket, invitation: Invitation, take: Take, end_time: float, silence: float) -> None:
    """Wait for the invited, and let nobody else in."""
    with door:
        while (left := end_time - time.monotonic()) > 0:
            door.settimeout(left)
            try:
                end, _ = door.accept()
            except OSError:
                return None
            try:
                window = _welcome(end, invitation, min(end_time, time.monotonic() + 1.0), silence)
            except OSError:
                end.close()
            else:
                door.close()
                return take(end, window)
    return None


def _welcome(end: socket.socket, invitation: Invitation, end_time: float, silence: float) -> int:
    said = _read(end, _SECRET + _WINDOW.size, end_time)
    if not hmac.compare_digest(said[:_SECRET], invitation.first):
        raise ConnectionError("it was not invited")
    _prepare(end, silence)
    own = _window(end)
    end.sendall(invitation.second + _WINDOW.pack(own))
    _read(end, len(_TAKEN), time.monotonic() + silence)
    return min(own, *_WINDOW.unpack(said[_SECRET:]))


def _read(end: socket.socket, size: int, end_time: float) -> bytes:
    """So many bytes. Raises OSError if they have not come in time."""
    data = b""
    while len(data) < size:
        end.settimeout(max(0.001, end_time - time.monotonic()))
        more = end.recv(size - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data


def _enlarge(end: socket.socket) -> None:
    """Before it connects: the window of TCP is chosen then."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)


def _prepare(end: socket.socket, silence: float) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    break_when_silent(end, silence / 3, silence)


def _window(end: socket.socket) -> int:
    """A quarter of what the system says it holds: it counts more than the bytes that are sent."""
    return min(end.getsockopt(socket.SOL_SOCKET, each) for each in (socket.SO_RCVBUF, socket.SO_SNDBUF)) // 4
