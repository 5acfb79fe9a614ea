"""A worker that joins a cluster: the process of `pippy worker --join`, from its first words to its end.

It imports what a worker needs, goes to the controller's door, says where it is, and waits until it is told which worker it is:
at once, or when it is to take the place of one that was lost. It ends when the controller says so, or is gone.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.process import exit_at_once, keep_freed_memory
from pippy.drivers.base.sign_process import start_sign_process
from pippy.drivers.engines.arguments import check_seconds, check_threads, device_name
from pippy.drivers.engines.connected.connected_worker import ConnectedWorker, RunSettings, place_of_this_process
from pippy.drivers.engines.joined.address import ControlLines, joined_address, secret_in, split_address
from pippy.drivers.engines.local.fork_server import load
from pippy.drivers.engines.local.local_cluster import WORKER
from pippy.drivers.wire.messages.doors import GuestRefused, Invitation, come_in
from pippy.drivers.wire.messages.handed_sockets import SocketPair, take_over
from pippy.drivers.wire.messages.sockets import break_when_silent
from pippy.ir.base.readable import count_with_noun

_GREETS = 10.0  # seconds for one attempt to come in
_AGAIN = 0.3  # seconds between two attempts
_REFUSALS = 3  # in a row, until the secret must be another: a door that many strangers push at sends guests away
_SILENCE = 5.0  # the seconds of cluster(timeout=), until the controller has said them
_BROKEN = 5.0  # seconds in which the controller says why a connection for messages has ended
_LONGEST = 4000  # characters of a traceback that the controller is told


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
    JoinedWorker(end, invitation).run({**place_of_this_process(), "device": device, "threads": threads})


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


class JoinedWorker:
    """A worker that has come in, by its connection with the controller. ``invitation`` is for its other connections."""

    def __init__(self, end: socket.socket, invitation: Invitation) -> None:
        self.lines, self.invitation = ControlLines(end), invitation
        self.address, self.where = end.getsockname()[0], joined_address(invitation.address, invitation.port)
        break_when_silent(end, _SILENCE)

    def run(self, place: dict[str, Any]) -> NoReturn:
        """Wait, and run commands, until this process ends."""
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no stage has to hear of it
        try:
            self.lines.send(place=place)
            _say(f"joined the cluster at {self.where}, and waits until it needs a worker")
            told = self._read()
            if "run" not in told:
                self._end(told)
            self._work(told["run"])
        except BaseException:
            threading.Event().wait(1.0)  # where the controller is gone, the other thread says so
            text = traceback.format_exc()
            with suppress(OSError):
                self.lines.send(failed=text[-_LONGEST:])
            _say(text)
            exit_at_once(1)

    def _work(self, run: dict[str, Any]) -> NoReturn:
        index, given = run["index"], run["settings"]
        settings = RunSettings(**given | {"names": tuple(given["names"])})
        threading.Thread(target=self._await_end, name="pippy control", daemon=True).start()
        messages, urgent = self._connections(run, settings.timeout)
        threads = count_with_noun(settings.threads, "thread")
        _say(
            f"is worker {settings.names[index]!r} (number {index} of {len(settings.names)}): {settings.device}, {threads}"
        )
        ConnectedWorker(index, self.address, settings, self._broke).run(messages, urgent)
        raise RuntimeError("the worker has ended by itself")

    def _connections(self, run: dict[str, Any], timeout: float) -> SocketPair:
        """The connections for messages: through memory that both see, or as more guests at the controller's door."""
        break_when_silent(self.lines.socket, timeout)
        if "invitation" in run:
            with come_in(Invitation.of_line(run["invitation"]), run["index"], timeout) as end:
                end.settimeout(timeout)
                messages, urgent = take_over(end, 2)
            return messages, urgent
        messages, urgent, signs = (come_in(self.invitation, number, timeout) for number in run["numbers"])
        for end in (messages, urgent, signs):
            break_when_silent(end, timeout)
        start_sign_process(signs)
        return messages, urgent

    def _read(self) -> dict[str, Any]:
        """What the controller says next."""
        try:
            said = self.lines.read()
        except ConnectionResetError:
            said = None
        except OSError as error:
            return {"end": f"the connection with the controller broke: {error}"}
        return said or {"end": "the controller has ended without closing the cluster"}

    def _await_end(self) -> NoReturn:
        self._end(self._read())

    def _end(self, said: dict[str, Any]) -> NoReturn:
        why = said.get("end", "the controller says something else than was expected")
        _say(f"ends: {'the cluster was closed' if why is None else why}")
        exit_at_once(0 if why is None else 1)

    def _broke(self) -> None:
        """A connection for messages has ended. The controller may be about to say why."""
        threading.Event().wait(_BROKEN)
        self._end({"end": "the connection with the controller broke"})


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"pippy worker: {text}", file=sys.stderr, flush=True)
