"""Sockets of this process: the kernel breaks those whose other end is silent, and what other code listens on is closed.

An end is silent when its host is gone, or the network is cut. Connections of strangers to a closed port are ended, too. Nothing
is imported here that takes long.
"""

import math
import os
import socket
import stat
from collections.abc import Collection, Iterable, Iterator
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


Ends = tuple[tuple[str, int], tuple[str, int]]  # the addresses of a connection: that of its own end, and of the other


def stop_listening(port: int) -> None:
    """Close the sockets of TCP of this process that listen at a port. The connections through them go on.

    Each number stays open, at a file that does nothing, since its owner will close it. To shut the socket down instead would
    let the thread of RPC that polls it run without end.

    >>> door = socket.create_server(("127.0.0.1", 0))
    >>> stop_listening(door.getsockname()[1])
    >>> os.readlink(f"/proc/self/fd/{door.fileno()}")
    '/dev/null'
    >>> door.close()
    """
    for fd, found in tcp_sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), fd, inheritable=False)


def connections() -> set[Ends]:
    """Both ends of each connection of TCP that this process has.

    >>> door = socket.create_server(("127.0.0.1", 0))
    >>> end = socket.create_connection(door.getsockname())
    >>> (end.getsockname(), door.getsockname()) in connections()
    True
    >>> end.close(), door.close()
    (None, None)
    """
    return {ends for ends, _ in _connected()}


def hang_up_on_strangers(port: int, peers: Iterable[Collection[Ends]]) -> None:
    """Shut down the connections that were made to a port of this process, but for those of its ``peers``.

    These are the `connections` of each. If of one of them none is found here, something on the way changes addresses: then it
    cannot be told who is a stranger, and all connections stay.

    >>> with socket.create_server(("127.0.0.1", 0)) as door:
    ...     port = door.getsockname()[1]
    ...     ends = [socket.create_connection(door.getsockname()) for _ in range(2)]
    ...     there = [door.accept()[0] for _ in ends]
    >>> hang_up_on_strangers(port, [{(ends[0].getsockname(), ends[0].getpeername())}])
    >>> ends[1].recv(1), there[0].send(b"x")
    (b'', 1)
    >>> for each in ends + there:
    ...     each.close()
    """
    known = [{(there, here) for here, there in each} for each in peers]
    came = {ends for ends, _ in _connected() if ends[0][1] == port}
    if all(each & came for each in known):
        strangers = came.difference(*known)
        for ends, found in _connected():
            if ends in strangers:
                found.shutdown(socket.SHUT_RDWR)


def _connected() -> Iterator[tuple[Ends, socket.socket]]:
    for _, found in tcp_sockets():
        with suppress(OSError):  # it is not connected
            here, there = found.getsockname(), found.getpeername()
            yield (here[:2], there[:2]), found
