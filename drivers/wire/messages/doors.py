"""Doors: how processes that do not know each other get a connection, of one host or of two. A door is open for a moment.

Of one host: a unix socket without a name, which this user's processes find among the open files of the process that opened it.
Both ends ask the system whether the other belongs to this user.

Of two hosts: one worker opens a port for one other, and closes it behind it.

    worker 2   opens a port, and tells worker 1, by RPC, where it is and two secrets of 32 random bytes
    worker 1   connects, and says the first secret
    worker 2   says the second secret
    worker 1   says that it takes the connection
    worker 2   closes the port, and takes the connection, too

A guest may have given up meanwhile. Then the host has no connection, either, and each sends its values in another way.

Whoever else connects does not know the first secret, is sent nothing, and nothing of what it sends is read beyond 32 bytes.
Whoever else answers does not know the second. The secrets are never written into a store. They go through RPC, so these
connections are worth as much trust as those of RPC, and no more.
"""

import hmac
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from pippy.drivers.wire.messages.silent_connections import break_when_silent

_SECRET = 32
_TAKEN = b"+"
_CREDENTIALS = struct.Struct("3i")

Take = Callable[[socket.socket], None]


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
    >>> invitation = open_door("127.0.0.1", taken.put, 5.0, 5.0)
    >>> guest = come_in(invitation, 5.0, 5.0)
    >>> host = taken.get()
    >>> host.sendall(b"hello"), guest.recv(5)
    (None, b'hello')
    >>> guest.close(), host.close()
    (None, None)
    """
    door = listen_at(address, 1)
    try:
        invitation = Invitation(address, door.getsockname()[1], os.urandom(_SECRET), os.urandom(_SECRET))
        waiting = _let_in, (door, invitation, take, time.monotonic() + within, silence)
        threading.Thread(target=waiting[0], args=waiting[1], name="pippy door", daemon=True).start()
    except BaseException:
        door.close()
        raise
    return invitation


def come_in(invitation: Invitation, within: float, silence: float) -> socket.socket:
    """Go to a door. Returns the connection. Raises OSError if that cannot be had in so many seconds."""
    end = connect_to(invitation.address, invitation.port, within)
    try:
        _prepare(end, silence)
        end.sendall(invitation.first)
        if not hmac.compare_digest(_read(end, _SECRET, time.monotonic() + within), invitation.second):
            raise ConnectionError("another program answers at the port that was opened for this connection")
        end.sendall(_TAKEN)
        return end
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


def listen_at(address: str, guests: int) -> socket.socket:
    """A port at an address of this host, which the system chooses, for so many guests at a time.

    >>> with listen_at("127.0.0.1", 1) as door, connect_to(*door.getsockname(), 5.0) as end:
    ...     end.getpeername() == door.getsockname()
    True
    """
    door = socket_for(address)
    try:
        door.bind((address, 0))
        door.listen(guests)
    except BaseException:
        door.close()
        raise
    return door


def connect_to(address: str, port: int, within: float) -> socket.socket:
    """Connect with a port. Raises OSError if that cannot be had in so many seconds."""
    end = socket_for(address)
    try:
        end.settimeout(within)
        end.connect((address, port))
    except BaseException:
        end.close()
        raise
    return end


@contextmanager
def listen_here(guests: int) -> Iterator[tuple[str, socket.socket]]:
    """A socket that listens, and where processes of this user can connect to it: among the open files of this process.

    A socket gets a name when it begins to listen, which is removed at once: whenever this process is killed, none is left.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door, ExitStack() as opened:
        directory = tempfile.mkdtemp(prefix="pippy-")
        try:
            folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, folder)
            name = f"/proc/self/fd/{folder}/door"  # the directory's own name may be longer than a unix socket's can
            door.bind(name)
            found = os.open(name, os.O_PATH | os.O_CLOEXEC)
            opened.callback(os.close, found)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        door.listen(guests)
        door.setblocking(False)
        yield f"/proc/{os.getpid()}/fd/{found}", door


def check_same_user(end: socket.socket) -> None:
    """Raise unless the other end is of a process of this user."""
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"it belongs to user {user}, and this process to user {os.geteuid()}")


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
                _welcome(end, invitation, min(end_time, time.monotonic() + 1.0), silence)
            except OSError:
                end.close()
            else:
                door.close()
                return take(end)
    return None


def _welcome(end: socket.socket, invitation: Invitation, end_time: float, silence: float) -> None:
    if not hmac.compare_digest(_read(end, _SECRET, end_time), invitation.first):
        raise ConnectionError("it was not invited")
    _prepare(end, silence)
    end.sendall(invitation.second)
    _read(end, len(_TAKEN), time.monotonic() + silence)


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


def _prepare(end: socket.socket, silence: float) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    break_when_silent(end, silence / 3, silence)
