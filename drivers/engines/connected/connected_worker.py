"""A worker in a process that pippy did not start.

It has two connections with the controller: for the messages that its main thread takes, and for urgent ones. With each worker
that it passes values to or takes them from it gets another one, when the controller says so.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pippy.drivers.base.process import began
from pippy.drivers.engines.local.fork_server import load
from pippy.drivers.protocol.commands import ComeIn, Connect
from pippy.drivers.wire.gpu.device_transport import for_device
from pippy.drivers.wire.messages.doors import THIS_HOST, Door, Invitation, come_in
from pippy.drivers.wire.messages.handed_sockets import hand_over, shared_memory_of, take_over, this_host
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
