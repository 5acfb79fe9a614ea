"""Where a cluster listens for workers that join: the argument ``join``, and HOST:PORT in the command of a worker."""

import errno
import socket
from contextlib import suppress
from typing import Any

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.torchrun.interfaces import addresses, link_to
from pippy.ir.base.readable import brief

_OUTSIDE = ("192.0.2.1", "2001:db8::1")  # in no network: what leads there leads to other hosts
_ANY = ("0.0.0.0", "::")


def split_address(text: str) -> tuple[str, int]:
    """The host and the port of an address.

    >>> split_address("node7:29400"), split_address("[fd00::1]:29400")
    (('node7', 29400), ('fd00::1', 29400))
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535 or (":" in host and host[0] != "["):
        raise ClusterError(
            f"{brief(text)} is no address; write HOST:PORT, as 10.0.0.1:29400, node7:29400 or [fd00::1]:29400"
        )
    return host.strip("[]"), int(port)


def joined_address(host: str, port: int) -> str:
    """The text that `split_address` reads.

    >>> joined_address("fd00::1", 29400)
    '[fd00::1]:29400'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_place(join: Any) -> tuple[str, int, str]:
    """Where to listen: an address, a port (0: the system chooses it), and the host that workers are told.

    >>> listening_place("127.0.0.1:29400")
    ('127.0.0.1', 29400, '127.0.0.1')
    """
    if join is True or (isinstance(join, int) and not isinstance(join, bool) and 0 <= join <= 65535):
        own = own_address()
        return own, 0 if join is True else join, own
    if not isinstance(join, str):
        raise ClusterError(
            f'join says where workers join: True, a port, or "HOST:PORT" with a name or an address of this host; this is '
            f"{brief(join)}"
        )
    host, port = split_address(join)
    if host in _ANY:
        return host, port, own_address()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ClusterError(
            f"join={join!r}: this host does not know the name {host!r} ({error}); {_advice()}"
        ) from error
    return str(found[0][4][0]), port, host


def own_address() -> str:
    """The address of this host by which others reach it; that of the loopback interface if there is no other."""
    for outside in _OUTSIDE:
        if (link := link_to(outside, 9)).address is not None:
            return link.address
    with suppress(StopIteration):
        return next(address for interface, address in addresses() if interface != "lo")
    return "127.0.0.1"


def cannot_listen(join: Any, address: str, port: int, error: OSError) -> ClusterError:
    """Why a cluster cannot listen there, and what to do."""
    if error.errno == errno.EADDRINUSE:
        why = f"another program has port {port} of {address}; give another port, or join=True, with which the system chooses"
    elif error.errno == errno.EADDRNOTAVAIL:
        why = f"{address} is no address of this host; {_advice()}"
    elif error.errno == errno.EACCES:
        why = f"this account may not listen on port {port}; give one of 1024 or more"
    else:
        why = f"this host cannot listen on port {port} of {address}: {error.strerror or error}"
    return ClusterError(f"join={brief(join)}: {why}")


def _advice() -> str:
    own = ", ".join(dict.fromkeys(address for _, address in addresses()))
    return f"its addresses are {own}; join=True takes the one that leads to other hosts"
