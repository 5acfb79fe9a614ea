"""How a worker joins a cluster: the process of `pippy worker --join`, until it has come in.

It imports what a worker needs, and goes to the controller's door. From then on it is a `MemberWorker`.
"""

import os
import signal
import socket
import sys
import time
from typing import NoReturn

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.process import keep_freed_memory
from pippy.drivers.engines.arguments import check_seconds, check_threads, device_name
from pippy.drivers.engines.connected_worker import load
from pippy.drivers.engines.hub.hub_worker import MemberWorker, place_of_this_process
from pippy.drivers.engines.joined.address import secret_in, split_address
from pippy.drivers.engines.local.local_cluster import WORKER
from pippy.drivers.wire.messages.doors import GuestRefused, Invitation, come_in, joined_address

_GREETS = 10.0  # seconds for one attempt to come in
_AGAIN = 0.3  # seconds between two attempts
_REFUSALS = 3  # in a row, until the secret must be another: a door that many strangers push at sends guests away


def join_cluster(
    join: str,
    secret_file: str | os.PathLike[str],
    device: str = "cpu",
    threads: int | None = None,
    within: float = 60.0,
) -> NoReturn:
    """Be a worker of the cluster that listens at HOST:PORT. This ends the process: with status 0 when the cluster is closed."""
    check_threads(threads)
    check_seconds(within=within)
    host, port = split_address(join)
    device, until = device_name(device), time.monotonic() + within
    secret = _secret_in(secret_file, until)
    keep_freed_memory()
    load(WORKER)
    end, invitation = _come_in(host, port, secret, until)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no stage has to hear of it
    member = MemberWorker(end, invitation, end.getsockname()[0], _say)
    member.run({**place_of_this_process(), "device": device, "threads": threads})
    raise RuntimeError("the worker has ended by itself")


def _secret_in(path: str | os.PathLike[str], until: float) -> bytes:
    """The secret in a file, which the script may make later."""
    told = False
    while True:
        try:
            return secret_in(path)
        except ClusterError as error:
            left = until - time.monotonic()
            if not isinstance(error.__cause__, FileNotFoundError) or left <= 0:
                raise
            if not told:
                told = True
                _say(f"{error}; waits {left:.0f} s for it")
        time.sleep(_AGAIN)


def _come_in(host: str, port: int, secret: bytes, until: float) -> tuple[socket.socket, Invitation]:
    """The connection with the controller, and the invitation for others. Tries again where nobody listens yet."""
    where, refused, told = joined_address(host, port), 0, False
    while True:
        why: OSError | None = None
        try:
            for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                invitation = Invitation(str(place[0]), port, secret)
                try:
                    return come_in(invitation, 0, min(_GREETS, max(0.1, until - time.monotonic()))), invitation
                except OSError as error:
                    why = error
        except (OSError, UnicodeError) as error:  # no such name, so far
            why = OSError(str(error))
        if isinstance(why, GuestRefused):
            refused += 1
            if refused == _REFUSALS or not isinstance(why.__cause__, ConnectionError):
                raise ClusterError(_refusal(where, why)) from why
        elif time.monotonic() > until:
            raise ClusterError(
                f"no cluster has answered at {where} in time: {why}. cluster(n, join=True) in the script prints the line to "
                "start workers with; a firewall must let this host connect to that port; --within gives the seconds"
            ) from why
        if not told and refused == 0:
            told = True
            _say(f"no cluster answers at {where} ({why}); tries again for {until - time.monotonic():.0f} s")
        time.sleep(_AGAIN)


def _refusal(where: str, why: OSError) -> str:
    if isinstance(why.__cause__, ConnectionError):
        return (
            f"{where} has closed the connection: the cluster there has another secret (compare the files: --secret-file), or "
            "no cluster listens there"
        )
    return f"the cluster at {where} refuses this worker: {why}"


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"pippy worker: {text}", file=sys.stderr, flush=True)
