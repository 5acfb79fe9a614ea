"""A worker in an actor of Ray.

The calls of Ray start it, and the last one, `run`, is answered when it is gone. All else goes over connections: for messages
and for urgent ones with the controller, and with each worker that it passes values to or takes them from.
"""

import os
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from pippy.drivers.base.versions import versions
from pippy.drivers.engines.arguments import device_name
from pippy.drivers.engines.kept_memory import keep_freed_memory
from pippy.drivers.engines.local.fork_server import load
from pippy.drivers.engines.ray.node_processes import began
from pippy.drivers.protocol.urgent import ComeIn, Connect
from pippy.drivers.wire.gpu.device_transport import for_device
from pippy.drivers.wire.memory import create_shared
from pippy.drivers.wire.messages.doors import THIS_HOST, Door, Invitation, come_in
from pippy.drivers.wire.messages.handed_sockets import hand_over, take_over, this_host
from pippy.drivers.wire.messages.message_connection import MessageStream, WorkerMessageConnection
from pippy.drivers.wire.messages.message_queue import MessageQueue
from pippy.drivers.wire.messages.silent_connections import SILENT, break_when_silent
from pippy.drivers.wire.messages.urgent import UrgentConnection, answer_at_once
from pippy.drivers.wire.worker_transport import WorkerTransport
from pippy.drivers.worker.worker_context import WorkerContext


@dataclass(frozen=True)
class RunSettings:
    """What a worker computes with. ``worker`` is the dotted name of the class that runs.

    >>> RunSettings("package.module:Class", ("a", "b"), "cpu", 1, 5.0, 0.0).threads
    1
    """

    worker: str
    names: tuple[str, ...]
    device: str
    threads: int
    timeout: float
    patience: float


class RayWorker:
    """The actor of worker ``index``. Ray writes its ``name`` before the lines that it prints."""

    def __init__(self, index: int, name: str) -> None:
        self.index, self.name = index, name
        self._ends: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's
        keep_freed_memory()

    def __repr__(self) -> str:
        return self.name

    def where(self, worker: str, device: str) -> dict[str, Any]:
        """Where this process is, and what it runs. Imports what the class of the worker needs."""
        import ray

        load(worker)
        context = ray.get_runtime_context()
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": began(os.getpid()),
            "node": context.get_node_id(),
            "memory": shared_memory_of(),
            "device": device_name(device),
            "cores": len(os.sched_getaffinity(0)),
            "versions": {**versions(), "ray": ray.__version__},
        }

    def open(self, near: bool, timeout: float) -> str:
        """Open a door for the controller. Returns the line of its invitation."""
        import ray

        self.timeout, self.address = timeout, ray.util.get_node_ip_address()
        door = Door(THIS_HOST if near else self.address, [0] if near else [0, 1], self._meet_controller, 4 * timeout)
        return door.invitation.line()

    def run(self, settings: RunSettings) -> None:
        """Run commands until this process ends."""
        torch.set_num_threads(settings.threads)
        ends = dict(self._ends.get(timeout=4 * self.timeout) for _ in range(2))
        messages = MessageQueue()
        near = ends[0].family == socket.AF_UNIX
        controller = WorkerMessageConnection(ends[0], messages).connection if near else None
        pinned = settings.device != "cpu"
        self.carrier = WorkerTransport(self.index, pinned=pinned, controller=controller, patience=settings.patience)
        transport, copies = for_device(settings.device, self.carrier)
        place = self.index, settings.names, messages, transport, settings.device, settings.threads
        self.worker = load(settings.worker)(WorkerContext(*place, copies=copies))
        if near:
            threading.Thread(target=self._end_after, args=(ends[1],), daemon=True).start()
        else:
            MessageStream(ends[1], lambda at, message, send: send(at, answer_at_once(self.urgent, message)), _end)
            MessageStream(ends[0], lambda at, message, send: messages.put_pickled(at, message, partial(send, at)), _end)
        self.worker.run()

    def urgent(self, message: Any) -> Any:
        """Answer at once, on a thread that is not the worker's own."""
        if isinstance(message, Connect):
            address = THIS_HOST if message.near else self.address
            return Door(address, [message.other], self._meet_peer, self.timeout).invitation
        if isinstance(message, ComeIn):
            return self._come_in(message.host, message.invitation)
        return self.worker.urgent(message)

    def _come_in(self, host: int, invitation: Invitation) -> None:
        end = come_in(invitation, self.index, self.timeout / 2)
        if end.family != socket.AF_UNIX:
            self._use_far(host, end)
            return
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end, there:
            end.settimeout(self.timeout / 2)
            if why := hand_over(end, [there]):
                here.close()
                raise OSError(f"worker {host} could not take a socket: {why}")
        self.carrier.add_near(host, here)

    def _meet_peer(self, guest: int, end: socket.socket) -> None:
        if end.family != socket.AF_UNIX:
            self._use_far(guest, end)
            return
        with end, suppress(OSError):  # the guest is told
            end.settimeout(self.timeout)
            (here,) = take_over(end, 1)
            self.carrier.add_near(guest, here)

    def _use_far(self, peer: int, end: socket.socket) -> None:
        break_when_silent(end, self.timeout, SILENT * self.timeout)
        self.carrier.add_far(peer, end)

    def _meet_controller(self, guest: int, end: socket.socket) -> None:
        if end.family != socket.AF_UNIX:
            break_when_silent(end, self.timeout, SILENT * self.timeout)
            self._ends.put((guest, end))
            return
        with end, suppress(OSError):  # the controller is told
            end.settimeout(self.timeout)
            for number, each in enumerate(take_over(end, 2)):
                self._ends.put((number, each))

    def _end_after(self, urgent: socket.socket) -> None:
        """Answer urgent messages. When the controller is gone, this process ends, whatever its main thread computes."""
        UrgentConnection(urgent, self.urgent).start().join()
        _end()


def shared_memory_of() -> str:
    """A text that is equal in processes which can share memory.

    >>> shared_memory_of() == shared_memory_of()
    True
    """
    try:
        descriptor, _ = create_shared(4096)
    except (OSError, AttributeError):
        return f"{this_host()} {os.getpid()}"
    os.close(descriptor)
    return this_host()


def _end(*_: Any) -> NoReturn:
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    finally:
        os._exit(0)
