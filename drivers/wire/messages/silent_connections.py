"""Has the kernel break the connections of this process whose other end is silent: its host is gone, or the network is cut."""

import math
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress

_SILENT = 4  # times the seconds between two probes, until a connection is broken


def break_silent_connections(seconds: float) -> None:
    """Probe each connection of TCP that stands, when so many seconds were quiet; break it after four times as many.

    The kernel at the other end answers, so a process that computes or is stopped is not silent. Without this, a process that
    waits for a message would never learn that nobody can send it any more. The calls through a connection fail when it breaks.

    >>> door = socket.create_server(("127.0.0.1", 0))
    >>> end = socket.create_connection(door.getsockname())
    >>> break_silent_connections(0.5)
    >>> end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    (1, 1)
    >>> end.close(), door.close()
    (None, None)
    """
    for _, found in tcp_sockets():
        with suppress(OSError):  # it is not connected
            found.getpeername()
            break_when_silent(found, max(1, math.ceil(seconds)))


def break_when_silent(end: socket.socket, quiet: float, silent: float | None = None) -> None:
    """Probe a connection of TCP when ``quiet`` seconds were quiet, and then as often; break it when ``silent`` seconds were.

    These are four times the quiet ones if they are not given.

    >>> with socket.socket() as end:
    ...     break_when_silent(end, 0.5, 2.5)
    ...     end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    1
    """
    whole = max(1, math.ceil(quiet))
    silent = _SILENT * quiet if silent is None else silent
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, whole)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, whole)
    # what was sent and is not acknowledged counts, too, and is not probed
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(silent * 1000))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """The sockets of TCP of this process, whoever opened them: the descriptor, and another of the same socket, until the next.

    >>> with socket.create_server(("127.0.0.1", 0)) as door:
    ...     door.fileno() in [fd for fd, _ in tcp_sockets()]
    True
    """
    for fd in filter(_is_socket, map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:  # an OSError: it is closed by now
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield fd, found


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # closed by now
        return False
