"""A worker in a process that pippy did not start: from its first words to its end.

A `MemberWorker` has come in, and waits until it is told which worker it is: at once, or when it is to take the place of one
that was lost. It ends when the controller says so, or is gone.

Then it runs as a `ConnectedWorker`. That has two more connections with the controller: for the messages that its main thread
takes, and for urgent ones. With each worker that it passes values to or takes them from it gets another one, when the
controller says so.
"""

import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from pippy.drivers.base.process import began, exit_at_once
from pippy.drivers.base.sign_process import start_sign_process
from pippy.drivers.engines.hub.members import ControlLines
from pippy.drivers.engines.local.fork_server import load
from pippy.drivers.protocol.commands import ComeIn, Connect
from pippy.drivers.wire.gpu.device_transport import for_device
from pippy.drivers.wire.messages.doors import THIS_HOST, Door, Invitation, come_in, joined_address
from pippy.drivers.wire.messages.handed_sockets import SocketPair, hand_over, shared_memory_of, take_over, this_host
from pippy.drivers.wire.messages.sockets import break_when_silent
from pippy.drivers.wire.messages.worker_messages import (
    MessageQueue,
    MessageStream,
    UrgentConnection,
    WorkerMessageConnection,
    answer_at_once,
)
from pippy.drivers.wire.worker_transport import WorkerTransport
from pippy.drivers.worker.worker_context import WorkerContext
from pippy.ir.base.readable import count_with_noun

_SILENCE = 5.0  # the seconds of cluster(timeout=), until the controller has said them
_BROKEN = 5.0  # seconds in which the controller says why a connection for messages has ended
_LONGEST = 4000  # characters of a traceback that the controller is told


@dataclass(frozen=True)
class RunSettings:
    """What a worker computes with. ``worker`` is the dotted name of the class that runs; records of its process are sent to the
    controller from ``log_level`` on.

    >>> RunSettings("package.module:Class", ("a", "b"), "cpu", 1, 5.0, 0.0).threads
    1
    """

    worker: str
    names: tuple[str, ...]
    device: str
    threads: int
    timeout: float
    patience: float
    log_level: int = 30


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


class ConnectedWorker:
    """Worker ``index``. Workers of other hosts reach it at ``address``. ``end`` is called when the controller is gone."""

    def __init__(self, index: int, address: str, settings: RunSettings, end: Callable[[], object]) -> None:
        self.index, self.address, self.settings, self._end = index, address, settings, end

    def run(self, messages: socket.socket, urgent: socket.socket) -> None:
        """Run the commands that come over these connections, until this process ends."""
        settings, queue = self.settings, MessageQueue()
        torch.set_num_threads(settings.threads)
        near = messages.family == socket.AF_UNIX
        controller = WorkerMessageConnection(messages, queue).connection if near else None
        pinned = settings.device != "cpu"
        self.carrier = WorkerTransport(self.index, pinned=pinned, controller=controller, patience=settings.patience)
        transport, copies = for_device(settings.device, self.carrier)
        place = self.index, settings.names, queue, transport, settings.device, settings.threads
        self.worker = load(settings.worker)(WorkerContext(*place, copies=copies, log_level=settings.log_level))
        if near:
            threading.Thread(target=self._end_after, args=(urgent,), daemon=True).start()
        else:
            MessageStream(urgent, lambda at, message, send: send(at, answer_at_once(self.urgent, message)), self._broke)
            MessageStream(
                messages, lambda at, message, send: queue.put_pickled(at, message, partial(send, at)), self._broke
            )
        self.worker.run()

    def urgent(self, message: Any) -> Any:
        """Answer at once, on a thread that is not the worker's own."""
        if isinstance(message, Connect):
            address = THIS_HOST if message.near else self.address
            return Door(address, [message.other], self._meet_peer, self.settings.timeout).invitation
        if isinstance(message, ComeIn):
            return self._come_in(message.host, message.invitation)
        return self.worker.urgent(message)

    def _come_in(self, host: int, invitation: Invitation) -> None:
        within = self.settings.timeout / 2
        try:
            end = come_in(invitation, self.index, within)
        except OSError as error:
            raise OSError(
                f"it gets no connection with worker {self.settings.names[host]!r} at {invitation.address}, port "
                f"{invitation.port}: {error}. Workers of different hosts connect with each other, at ports that their systems "
                "choose: a firewall between the hosts must let them, and a tunnel from each to the script is not enough"
            ) from error
        if end.family != socket.AF_UNIX:
            self._use_far(host, end)
            return
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end, there:
            end.settimeout(within)
            if why := hand_over(end, [there]):
                here.close()
                raise OSError(f"worker {host} could not take a socket: {why}")
        self.carrier.add_near(host, here)

    def _meet_peer(self, guest: int, end: socket.socket) -> None:
        if end.family != socket.AF_UNIX:
            self._use_far(guest, end)
            return
        with end, suppress(OSError):  # the guest is told
            end.settimeout(self.settings.timeout)
            (here,) = take_over(end, 1)
            self.carrier.add_near(guest, here)

    def _use_far(self, peer: int, end: socket.socket) -> None:
        break_when_silent(end, self.settings.timeout)
        self.carrier.add_far(peer, end)

    def _broke(self, *_: Any) -> None:
        self._end()

    def _end_after(self, urgent: socket.socket) -> None:
        """Answer urgent messages. When the controller is gone, this process ends, whatever its main thread computes."""
        UrgentConnection(urgent, self.urgent).start().join()
        self._end()


class MemberWorker:
    """A worker that has come in, by its connection ``end`` with the controller.

    ``invitation`` is for its other connections. Workers of other hosts reach it at ``address``. ``say`` prints what it does.
    ``becomes`` is called when it gets its place, and raises if it cannot be that worker.
    """

    def __init__(
        self,
        end: socket.socket,
        invitation: Invitation,
        address: str,
        say: Callable[[str], object],
        becomes: Callable[[int, RunSettings], object] = lambda index, settings: None,
    ) -> None:
        self.lines, self.invitation, self.address = ControlLines(end), invitation, address
        self.say, self.becomes = say, becomes
        if end.family != socket.AF_UNIX:
            break_when_silent(end, _SILENCE)

    def run(self, place: dict[str, Any] | None = None) -> NoReturn:
        """Say where this process is, unless that is known, and wait; then run commands, until the process ends."""
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no stage has to hear of it
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
            self.say(text)
            exit_at_once(1)

    def _work(self, run: dict[str, Any]) -> NoReturn:
        index, given = run["index"], run["settings"]
        settings = RunSettings(**given | {"names": tuple(given["names"])})
        threading.Thread(target=self._await_end, name="pippy control", daemon=True).start()
        if self.lines.socket.family != socket.AF_UNIX:
            break_when_silent(self.lines.socket, settings.timeout)
        self.becomes(index, settings)
        messages, urgent = self._connections(run, settings.timeout)
        threads = count_with_noun(settings.threads, "thread")
        self.say(
            f"is worker {settings.names[index]!r} (number {index} of {len(settings.names)}): {settings.device}, {threads}"
        )
        ConnectedWorker(index, self.address, settings, self._broke).run(messages, urgent)
        raise RuntimeError("the worker has ended by itself")

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
            return {"end": f"the connection with the controller broke: {error}"}
        return said or {"end": "the controller has ended without closing the cluster"}

    def _await_end(self) -> NoReturn:
        self._end(self._read())

    def _end(self, said: dict[str, Any]) -> NoReturn:
        why = said.get("end", "the controller says something else than was expected")
        self.say(f"ends: {'the cluster was closed' if why is None else why}")
        exit_at_once(0 if why is None else 1)

    def _broke(self) -> None:
        """A connection for messages has ended. The controller may be about to say why."""
        threading.Event().wait(_BROKEN)
        self._end({"end": "the connection with the controller broke"})
