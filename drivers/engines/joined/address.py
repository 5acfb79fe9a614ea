"""Where a cluster listens for workers that join, and the secret that lets them.

The place is the argument ``join``, and HOST:PORT in the command of a worker. The secret is in a file that only its owner may
read.
"""

import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.hub.interfaces import addresses, link_to
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
    return ClusterError(
        f"join={brief(join)}: this host cannot listen at port {port} of {address}: {error.strerror or error}; give a port of "
        f"1024 or more that no other program has. For this host, {_advice()}, and a free port"
    )


def _advice() -> str:
    own = ", ".join(dict.fromkeys(address for _, address in addresses()))
    return f"the addresses are {own}, and join=True takes the one that leads to other hosts"


DEFAULT_SECRET = "~/.pippy/secret"
_SHORTEST, _LONGEST = 16, 4096  # bytes


def secret_in(path: str | os.PathLike[str]) -> bytes:
    """The secret in a file. Raises ClusterError if there is none, or others can read it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     secret_in(made_secret_file(f"{folder}/secret")) == secret_in(made_secret_file(f"{folder}/secret"))
    True
    """
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            said = opened.read(_LONGEST + 1)
    except FileNotFoundError as error:
        raise ClusterError(
            f"there is no secret file {str(file)!r}; the script makes one where it runs (cluster(n, join=True) prints its "
            "path): copy it to this host, and give its path"
        ) from error
    except OSError as error:
        raise ClusterError(f"the secret file {str(file)!r} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ClusterError(
            f"other accounts can read or change the secret file {str(file)!r}, and who has the secret can run code as you; "
            f"take a new one, with the file gone: cluster(n, join=True) makes it. Or, if nobody has read it: chmod 600 {file}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise ClusterError(
            f"the secret file {str(file)!r} belongs to user {status.st_uid}, who knows the secret; take one of your own"
        )
    secret = said.strip()
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise ClusterError(
            f"the secret file {str(file)!r} has {len(secret)} bytes, where a secret has {_SHORTEST} to {_LONGEST}; remove the "
            "file, and cluster(n, join=True) makes another"
        )
    return secret


def made_secret_file(path: str | os.PathLike[str]) -> Path:
    """The path of a secret file, which is made if it is not there: with 32 random bytes, for its owner alone."""
    file = Path(path).expanduser().absolute()
    if file.exists():
        return file
    made = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as opened:
                opened.write(f"{secrets.token_hex(32)}\n")
            os.link(made, file)  # whole, or another's that was quicker
        except FileExistsError:
            pass
        finally:
            made.unlink()
    except OSError as error:
        raise ClusterError(
            f"the secret file {str(file)!r} cannot be made: {error.strerror}; give another path as secret_file="
        ) from error
    return file
