"""A worker in a process that pippy did not start: from its first words to its end.

A `MemberWorker` has come in, and waits until it is told which worker it is: at once, or when it is to take the place of one
that was lost. It ends when the controller says so, or is gone. Then it runs as a `ConnectedWorker`.
"""

import os
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from pippy.drivers.base.json_lines import JsonLines
from pippy.drivers.base.process import began, exit_at_once
from pippy.drivers.base.sign_process import start_sign_process
from pippy.drivers.engines.connected_worker import ConnectedWorker, RunSettings
from pippy.drivers.wire.messages.doors import Invitation, come_in, joined_address
from pippy.drivers.wire.messages.handed_sockets import SocketPair, shared_memory_of, take_over, this_host
from pippy.drivers.wire.messages.sockets import break_when_silent
from pippy.ir.base.readable import count_with_noun

_SILENCE = 5.0  # the seconds of cluster(timeout=), until the controller has said them
_BROKEN = 5.0  # seconds in which the controller says why a connection for messages has ended
_LONGEST = 4000  # characters of a traceback that the controller is told


def place_of_this_process() -> dict[str, Any]:
    """Where a worker of this process is, and what it has.

    >>> place_of_this_process()["pid"] == os.getpid()
    True
    """
    return {
        "host": socket.gethostname(),
        "machine": this_host(),
        "pid": os.getpid(),
        "began": began(os.getpid()),
        "memory": shared_memory_of(),
        "cores": sorted(os.sched_getaffinity(0)),
    }


class MemberWorker:
    """A worker that has come in, by its connection ``end`` with the controller.

    ``invitation`` is for its other connections. Workers of other hosts reach it at ``address``. ``say`` prints what it does.
    ``becomes`` is called when it gets its place, and raises if it cannot be that worker. ``worker`` is there from then on.
    """

    worker: ConnectedWorker | None = None

    def __init__(
        self,
        end: socket.socket,
        invitation: Invitation,
        address: str,
        say: Callable[[str], object],
        becomes: Callable[[int, RunSettings], object] = lambda index, settings: None,
    ) -> None:
        self.lines, self.invitation, self.address = JsonLines(end), invitation, address
        self.say, self.becomes = say, becomes
        if end.family != socket.AF_UNIX:
            break_when_silent(end, _SILENCE)

    def run(self, place: dict[str, Any] | None = None) -> None:
        """Say where this process is, unless that is known, wait, and run commands to the end of the worker."""
        try:
            if place is not None:
                self.lines.send(place=place)
            where = joined_address(self.invitation.address, self.invitation.port)
            self.say(f"joined the cluster at {where}, and waits until it needs a worker")
            told = self._read()
            if "run" not in told:
                self._end(told)
            self._work(told["run"])
        except BaseException:
            threading.Event().wait(1.0)  # where the controller is gone, the other thread says so
            text = traceback.format_exc()
            with suppress(OSError):
                self.lines.send(failed=text[-_LONGEST:])
            self.tell_failure(text)
            exit_at_once(1)

    def tell_failure(self, text: str) -> None:
        """Say why the worker has ended."""
        self.say(text)

    def _work(self, run: dict[str, Any]) -> None:
        index, given = run["index"], run["settings"]
        settings = RunSettings(**given | {"names": tuple(given["names"])})
        if self.lines.socket.family != socket.AF_UNIX:
            break_when_silent(self.lines.socket, settings.timeout)
        self.worker = self.made_worker(index, settings)
        threading.Thread(target=self._await_end, name="pippy control", daemon=True).start()
        self.becomes(index, settings)
        self.start_worker(self.worker, run)
        threads = count_with_noun(settings.threads, "thread")
        self.say(
            f"is worker {settings.names[index]!r} (number {index} of {len(settings.names)}): {settings.device}, {threads}"
        )
        self.worker.run()

    def made_worker(self, index: int, settings: RunSettings) -> ConnectedWorker:
        """The worker of this process."""
        return ConnectedWorker(index, self.address, settings, self._broke)

    def start_worker(self, worker: ConnectedWorker, run: dict[str, Any]) -> None:
        """Start it, with what the controller has said of its connections."""
        worker.start(*self._connections(run, worker.settings.timeout))

    def _connections(self, run: dict[str, Any], timeout: float) -> SocketPair:
        """The connections for messages: through memory that both see, or as more guests at the controller's door."""
        told = run["invitation"]
        invitation = self.invitation if told is None else Invitation.of_line(told)
        first, *others = (come_in(invitation, number, timeout) for number in run["numbers"])
        if not others:
            with first:
                first.settimeout(timeout)
                messages, urgent = take_over(first, 2)
            return messages, urgent
        urgent, signs = others
        for end in (first, urgent, signs):
            break_when_silent(end, timeout)
        start_sign_process(signs)
        return first, urgent

    def _read(self) -> dict[str, Any]:
        """What the controller says next."""
        try:
            said = self.lines.read()
        except ConnectionResetError:
            said = None
        except OSError as error:
            return {"gone": f"the connection with the controller broke: {error}"}
        return said or {"gone": "the controller has ended without closing the cluster"}

    def _await_end(self) -> NoReturn:
        self._end(self._read())

    def _end(self, said: dict[str, Any]) -> NoReturn:
        why = said.get("gone") or said.get("end", "the controller says something else than was expected")
        try:
            self.say(f"ends: {'the cluster was closed' if why is None else why}")
        finally:  # also where there is no memory to say it
            exit_at_once(0 if why is None else 1)

    def _broke(self) -> None:
        """A connection for messages has ended. The controller may be about to say why."""
        threading.Event().wait(_BROKEN)
        self._end({"gone": "the connection with the controller broke"})
