"""Ends the listening of sockets that belong to other code of this process, and the connections of strangers there."""

import os
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from pippy.drivers.wire.messages.silent_connections import tcp_sockets

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
