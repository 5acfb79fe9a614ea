"""Processes of one host that do not know each other hand over sockets, through a connection that a door (doors.py) gave them.

Beside the sockets goes memory that both must see: where it cannot be shared, no socket is taken.
"""

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from pippy.drivers.base.host_errors import no_descriptor
from pippy.drivers.wire.memory import create_shared, map_shared

SocketPair = tuple[socket.socket, socket.socket]  # for messages, and for urgent ones

_CONTENT, _TAKEN = 32, b"+"  # the bytes that memory begins with; the answer to a process whose sockets were taken


def this_host() -> str:
    """A text that is equal in processes that seem to be on one host: they see the same files, and may share memory.

    The environment variable PIPPY_HOST makes processes of one host count as several hosts.
    """
    mounts = ""
    with suppress(OSError):
        mounts = os.readlink("/proc/self/ns/mnt")
    try:
        running = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        running = socket.gethostname()
    return f"{running} {mounts} {os.environ.get('PIPPY_HOST', '')}"


def shared_memory_of() -> str:
    """A text that is equal in processes of one user which can share memory.

    >>> shared_memory_of() == shared_memory_of()
    True
    """
    try:
        descriptor, _ = create_shared(4096)
    except (OSError, AttributeError):
        return f"{this_host()} {os.getpid()}"
    os.close(descriptor)
    return f"{this_host()} {os.geteuid()}"


def close_all(ends: Iterable[socket.socket]) -> None:
    """Close these sockets."""
    for end in ends:
        end.close()


def hand_over(end: socket.socket, sockets: Sequence[socket.socket]) -> None:
    """Hand sockets to the process at the other end of a connection. Raises OSError if it cannot take them.

    >>> import threading
    >>> here, there = socket.socketpair()
    >>> (given, theirs), taken = socket.socketpair(), []
    >>> thread = threading.Thread(target=lambda: taken.extend(take_over(there, 1)))
    >>> thread.start(), hand_over(here, [theirs]), thread.join()
    (None, None, None)
    >>> given.sendall(b"hello"), taken[0].recv(5)
    (None, b'hello')
    >>> close_all([here, there, given, theirs, *taken])
    """
    with ExitStack() as used:
        descriptor, memory = create_shared(4096)
        used.callback(os.close, descriptor)
        content = os.urandom(_CONTENT)
        memory.bytes[:_CONTENT] = content
        socket.send_fds(end, [content], [descriptor, *(each.fileno() for each in sockets)])
        answer = end.recv(4096)
        if answer != _TAKEN:
            raise OSError(answer.decode() or "it is not there")


def hand_over_pairs(end: socket.socket) -> SocketPair:
    """Make two sockets, and hand their other ends to another process. Returns the own ends. Raises OSError if it takes none.

    >>> import threading
    >>> here, there = socket.socketpair()
    >>> thread = threading.Thread(target=lambda: close_all(take_over(there, 2)))
    >>> thread.start(); own = hand_over_pairs(here); thread.join()
    >>> close_all([here, there, *own])
    """
    with ExitStack() as used, ExitStack() as undo:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        undo.callback(close_all, [own for own, _ in pairs])
        used.callback(close_all, [theirs for _, theirs in pairs])
        hand_over(end, [theirs for _, theirs in pairs])
        undo.pop_all()
    return pairs[0][0], pairs[1][0]


def take_over(end: socket.socket, count: int) -> tuple[socket.socket, ...]:
    """So many sockets from the process at the other end. Raises OSError, which that process is told, if they cannot be had."""
    try:
        taken = _taken(end, count)
    except (OSError, ValueError) as error:
        end.sendall(str(error).encode())
        raise OSError(str(error)) from error
    end.sendall(_TAKEN)
    return taken


def _taken(end: socket.socket, count: int) -> tuple[socket.socket, ...]:
    content, descriptors, _, _ = socket.recv_fds(end, _CONTENT, count + 1)
    with ExitStack() as undo:
        for descriptor in descriptors:
            undo.callback(os.close, descriptor)
        if len(descriptors) <= count:
            raise no_descriptor("the sockets and the memory of another process")
        if bytes(map_shared(descriptors[0]).part(0, _CONTENT)) != content:
            raise OSError("what the other process writes into memory cannot be seen")
        return tuple(socket.socket(fileno=os.dup(each)) for each in descriptors[1:])
