"""Ends the listening of sockets that belong to other code of this process."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress


def stop_listening(port: int | None = None) -> None:
    """Close the sockets of TCP that listen: all of this process, or those of one port. The connections through them go on.

    Each number stays open, at a file that does nothing, since its owner will close it. To shut the socket down instead would
    let the thread of RPC that polls it run without end.

    >>> door = socket.create_server(("127.0.0.1", 0))
    >>> stop_listening(door.getsockname()[1])
    >>> os.readlink(f"/proc/self/fd/{door.fileno()}")
    '/dev/null'
    >>> door.close()
    """
    for fd, its_port in _listening():
        if port in (None, its_port):
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), fd, inheritable=False)


def _listening() -> Iterator[tuple[int, int]]:
    """The file descriptors and ports of the sockets of TCP that listen."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:  # an OSError: it is no socket
            accepts = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if accepts and found.family in (socket.AF_INET, socket.AF_INET6):
                yield fd, found.getsockname()[1]
