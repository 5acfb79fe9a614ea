"""A worker: its connections with the controller, and with other workers.

It has two connections with the controller of another process: for the messages that its main thread takes, and for urgent ones.
With each worker that it passes values to or takes them from it gets another one, when the controller says so. All of these use
memory that both processes see, where there is any, and else TCP.
"""

import importlib
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pippy.drivers.protocol.commands import GIVE_UP_ALL, ComeIn, Connect
from pippy.drivers.wire.gpu.device_transport import for_device
from pippy.drivers.wire.messages.doors import THIS_HOST, Door, Invitation, come_in
from pippy.drivers.wire.messages.handed_sockets import hand_over, take_over
from pippy.drivers.wire.messages.sockets import break_when_silent
from pippy.drivers.wire.messages.worker_messages import (
    Ended,
    MessageQueue,
    MessageStream,
    UrgentConnection,
    WorkerMessageConnection,
    answer_at_once,
)
from pippy.drivers.wire.worker_transport import WorkerTransport
from pippy.drivers.worker.worker_context import WorkerContext

# torch, and what the first command and the first backward would import in each worker.
NEEDED = ("torch", "numpy.random", "torch.fx.experimental.symbolic_shapes")


def load(dotted: str) -> type:
    """The class with a dotted name.

    >>> load("pippy.drivers.engines.local.fork_server:Died").__name__
    'Died'
    """
    module, _, name = dotted.partition(":")
    for needed in NEEDED:
        importlib.import_module(needed)
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class RunSettings:
    """What a worker computes with. ``worker`` is the dotted name of the class that runs; records of its process are sent to the
    controller from ``log_level`` on. The workers ``near`` compute on devices of this host.

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
    near: tuple[int, ...] = ()


class Peers:
    """Gets worker ``index`` its connections with others: of two, one opens a door, and the other comes in there.

    Those that share no memory with it reach it at ``address``. The connections are for the ``carrier`` of values.
    """

    def __init__(
        self, index: int, names: Sequence[str], address: str, timeout: float, carrier: WorkerTransport
    ) -> None:
        self.index, self.names, self.address, self.timeout, self.carrier = index, names, address, timeout, carrier

    def answer(self, message: Connect | ComeIn) -> Invitation | None:
        """Let another worker in, or go to its door."""
        if isinstance(message, ComeIn):
            self._come_in(message.host, message.invitation)
            return None
        address = THIS_HOST if message.near else self.address
        return Door(address, [message.other], self._meet, self.timeout).invitation

    def _come_in(self, host: int, invitation: Invitation) -> None:
        try:
            end = come_in(invitation, self.index, self.timeout / 2)
        except OSError as error:
            raise OSError(
                f"it gets no connection with worker {self.names[host]!r} at {invitation.address}, port "
                f"{invitation.port}: {error}. Workers of different hosts connect with each other, at ports that their systems "
                "choose: a firewall between the hosts must let them, and a tunnel from each to the script is not enough"
            ) from error
        if end.family != socket.AF_UNIX:
            self._use_far(host, end)
            return
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end, there:
            end.settimeout(self.timeout / 2)
            try:
                hand_over(end, [there])
            except OSError as error:
                here.close()
                raise OSError(f"worker {host} could not take a socket: {error}") from error
        self.carrier.add_near(host, here)

    def _meet(self, guest: int, end: socket.socket) -> None:
        if end.family != socket.AF_UNIX:
            self._use_far(guest, end)
            return
        with end, suppress(OSError):  # the guest is told
            end.settimeout(self.timeout)
            (here,) = take_over(end, 1)
            self.carrier.add_near(guest, here)

    def _use_far(self, peer: int, end: socket.socket) -> None:
        break_when_silent(end, self.timeout)
        self.carrier.add_far(peer, end)


class ConnectedWorker:
    """Worker ``index``. `start` makes it, and lets it be reached; then ``run`` runs the commands that come.

    Workers with which it shares no memory reach it at ``address``. ``broke`` is called when the controller is gone. ``carry``
    makes what carries its values.
    """

    def __init__(
        self,
        index: int,
        address: str,
        settings: RunSettings,
        broke: Callable[[], object] = lambda: None,
        carry: Callable[..., WorkerTransport] = WorkerTransport,
    ) -> None:
        self.index, self.address, self.settings, self._end, self._carry = index, address, settings, broke, carry
        self.queue = MessageQueue()

    def start(
        self, messages: socket.socket | None = None, urgent: socket.socket | None = None, shares_process: bool = False
    ) -> None:
        """Make the worker, whose controller is at the other ends of these connections, if there are any."""
        settings, queue = self.settings, self.queue
        near = messages is not None and messages.family == socket.AF_UNIX
        controller = WorkerMessageConnection(messages, queue).connection if messages is not None and near else None
        pinned = settings.device != "cpu"
        carrier = self._carry(self.index, pinned=pinned, controller=controller, patience=settings.patience)
        self.transport, copies = for_device(settings.device, carrier, settings.near)
        self.peers = Peers(self.index, settings.names, self.address, settings.timeout, carrier)
        place = self.index, settings.names, queue, self.transport, settings.device, settings.threads
        self.worker = load(settings.worker)(WorkerContext(*place, shares_process, copies, settings.log_level))
        if messages is None or urgent is None:
            return
        if near:
            UrgentConnection(urgent, self.urgent, self._end).start()
        else:
            MessageStream(urgent, lambda at, message, send: send(at, answer_at_once(self.urgent, message)), self._broke)
            MessageStream(
                messages, lambda at, message, send: queue.put_pickled(at, message, partial(send, at)), self._broke
            )

    def run(self) -> None:
        """Run the commands that come, until `end`, or until this process ends."""
        torch.set_num_threads(self.settings.threads)  # torch has this setting for each thread
        with suppress(Ended):
            self.worker.run()
        self.transport.close()

    def end(self) -> None:
        """Give up the current command, and let ``run`` return. From any thread."""
        self.worker.urgent(GIVE_UP_ALL)
        self.queue.end()

    def urgent(self, message: Any) -> Any:
        """Answer at once, on a thread that is not the worker's own."""
        if isinstance(message, Connect | ComeIn):
            return self.peers.answer(message)
        return self.worker.urgent(message)

    def _broke(self, *_: Any) -> None:
        self._end()
