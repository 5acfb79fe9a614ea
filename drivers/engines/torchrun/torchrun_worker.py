"""A worker in a process that torchrun started: how it runs, and how it ends."""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.futures import Future

from pippy.drivers.engines.connected_worker import Peers
from pippy.drivers.engines.torchrun.ranks import CONTROLLER
from pippy.drivers.protocol.commands import GIVE_UP_ALL, ComeIn, Connect, Ping
from pippy.drivers.wire.gpu.device_transport import for_device
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.doors import Invitation
from pippy.drivers.wire.messages.rpc import BEYOND, transport_by_rpc
from pippy.drivers.wire.messages.worker_messages import (
    Ended,
    MessageQueue,
    UrgentConnection,
    WorkerMessageConnection,
)
from pippy.drivers.wire.pickling import pickle_message
from pippy.drivers.worker.worker import Worker
from pippy.drivers.worker.worker_context import WorkerContext
from pippy.ir.base.logs import LOGGER

_log = logging.getLogger(__name__)


LEAVES_WITHIN = 5.0  # seconds that a worker has to end what it does when its cluster is closed
ASKS_AFTER = 10.0  # seconds, and two timeouts, between looks at whether the controller lives
_AGAIN = 0.2  # seconds from a ping that failed to the next


@dataclass(frozen=True)
class Leave:
    """An urgent message: the controller closes the cluster. The first one tells all workers that connections will break.

    The second one, with ``now``, tells them to leave. ``why`` says which worker the cluster has lost, if it has lost one.

    >>> Leave(now=True)
    Leave(now=True, why=None)
    """

    now: bool
    why: str | None = None


class TorchrunWorker:
    """A worker. ``run`` runs it on the thread that calls it, ``start`` on a thread of its own.

    ``peer`` gives the RPC name of the process that hosts a worker. ``sockets``, if the controller is of this host, are for its
    messages, and for urgent ones. To workers that are ``far`` values go over TCP if ``address``, the one of this host that
    others reach, is known, else by RPC. The workers ``near`` compute on devices of this host.
    """

    def __init__(
        self,
        index: int,
        names: Sequence[str],
        device: str,
        peer: Callable[[int], str],
        threads: int | None = None,
        shares_process: bool = False,
        timeout: float = 5.0,
        sockets: tuple[socket.socket, socket.socket] | None = None,
        far: Collection[int] = (),
        patience: float = 0.0,
        address: str | None = None,
        near: Collection[int] = (),
    ) -> None:
        self.messages, self.threads = MessageQueue(), threads
        first = WorkerMessageConnection(sockets[0], self.messages).connection if sockets else None
        carrier, self.values = transport_by_rpc(
            index, peer, CONTROLLER, timeout, pinned=device != "cpu", controller=first, patience=patience, far=far
        )
        self.transport, copies = for_device(device, carrier, near)
        silence = timeout + BEYOND
        self.far, self.peers = frozenset(far), Peers(index, names, address, timeout, carrier, [silence / 3, silence])
        context = WorkerContext(
            index,
            tuple(names),
            self.messages,
            self.transport,
            device,
            threads or torch.get_num_threads(),
            shares_process,
            copies,
            LOGGER.getEffectiveLevel(),
        )
        self.worker = Worker(context)
        self.index, self.name, self.left = index, names[index], False
        self.thread: threading.Thread | None = None
        self._leaves = threading.Event()
        rpc.serve(rpc.Served(self.messages, self.urgent, self.transport.deliver))
        if sockets:
            UrgentConnection(sockets[1], self.urgent).start()

    def run(self) -> None:
        """Run commands until the controller tells the worker to leave."""
        if self.threads:
            torch.set_num_threads(self.threads)  # torch has this setting for each thread
        with suppress(Ended):
            self.worker.run()
        self.transport.close()

    def start(self) -> None:
        """Run on a thread beside the controller's."""
        self.thread = threading.Thread(target=self.run, name=f"pippy {self.name}", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Give up the current command and let ``run`` return. Waits up to a second for a thread that `start` has started."""
        self.values.end()
        self.worker.urgent(GIVE_UP_ALL)
        self.messages.end()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(1.0)

    def urgent(self, message: Any) -> Any:
        """Answer at once, on a thread that is not the worker's own."""
        if isinstance(message, Connect | ComeIn):
            return self._connect(message)
        if not isinstance(message, Leave):
            return self.worker.urgent(message)
        if message.now:
            self._leaves.set()
        if message.why is not None and not message.now:
            write_error_line(f"worker {self.name!r} (pid {os.getpid()}) leaves: {message.why}")
        rpc.stderr_filter.start()
        self.values.end()
        if message.now:
            self.end()
        return None

    def see_to_leaving(self) -> None:
        """Have a thread end this process if it is told to leave and stays: one that began only then might find no memory."""
        threading.Thread(target=self._leave, name="pippy leaves", daemon=True).start()

    def _leave(self) -> None:
        self._leaves.wait()
        time.sleep(LEAVES_WITHIN)
        self._still_here()

    def _connect(self, message: Connect | ComeIn) -> Invitation | None:
        """Get a connection with another worker. Without it values go by RPC to one of another host, and a warning is logged."""
        peer = message.other if isinstance(message, Connect) else message.host
        try:
            return self.peers.answer(message)
        except OSError as error:
            if peer not in self.far:
                raise
            _log.warning(
                "worker %d passes all values to and from worker %d by RPC, which takes longer: it got no connection of its "
                "own with it: %s",
                self.index,
                peer,
                error.__cause__ or error,
            )
            return None

    def has_left(self) -> None:
        """Note that the worker has left its cluster: from then on the process belongs to the script alone."""
        self.left = True

    def _still_here(self) -> None:
        """End the process if its stage goes on computing. If it has left the cluster, say what still runs."""
        who = f"worker {self.name!r} (pid {os.getpid()})"
        if not self.left:
            end_rank(
                f"{who} ends itself: {LEAVES_WITHIN:g} s after its cluster was closed it was still at {self.worker.doing()}"
            )
        rpc.stderr_filter.stop()
        threads = [
            each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()
        ]
        what = (
            f"its threads {', '.join(map(repr, threads))}" if threads else "an exit handler, or a finally of the script"
        )
        write_error_line(
            f"the process of {who} goes on {LEAVES_WITHIN:g} s after it has left its cluster: it waits for {what}"
        )

    def watch(self, controller: str, timeout: float) -> None:
        """End this process when the controller has ended: at once if the connection to it breaks.

        A network that is cut, or a host that is gone, breaks the connection after 4 × timeout, whatever the worker does. A
        controller that is stopped breaks none. So while the worker waits inside a step, it pings the controller from time
        to time, and ends after at most 3 × timeout + 10 s; so does one that has lost another worker.
        """
        watched = rpc.watch(controller, timeout, self._broke)
        threading.Thread(target=self._ask, args=(controller, timeout, watched), daemon=True).start()

    def _ask(self, controller: str, timeout: float, watched: "Future[Any]") -> None:
        pause = threading.Event()
        while not pause.wait(2 * timeout + ASKS_AFTER):
            with suppress(MemoryError):  # there may be some when it is asked again
                if watched.done():  # there was no memory to say so
                    self._broke()
                in_step = self.worker.command is not None and self.transport.waiting_for() is not None
                if (in_step or self.values.lost_peers) and not answers_ping(controller, timeout):
                    self._gone(f"the controller left a ping unanswered for {timeout:g} s")

    def _broke(self) -> None:
        self._gone("the connection to the controller broke")

    def _gone(self, why: str) -> None:
        if not self.messages.ended:
            end_rank(f"worker {self.name!r} (pid {os.getpid()}) ends itself: {why}")


def answers_ping(controller: str, timeout: float) -> bool:
    """Whether a process answers a ping in time. A ping that fails is no answer: another one is sent."""
    end_time = time.monotonic() + timeout
    while (left := end_time - time.monotonic()) > 0:
        try:
            ping = rpc.urgent(controller, pickle_message(Ping()))
        except ConnectionError:
            return False
        rpc.wait_all([ping], left)
        if not ping.done():
            return False
        with suppress(Exception):  # RPC raises errors of all kinds
            ping.value()
            return True
        time.sleep(min(_AGAIN, left))
    return False


def end_rank(why: str) -> NoReturn:
    """End this process at once: the main thread may be computing, or may wait without an end."""
    try:
        rpc.stderr_filter.stop()
        write_error_line(why)
    finally:  # also where there is no memory for the line
        os._exit(1)


def write_error_line(what: str) -> None:
    """Write a line to standard error."""
    print(f"pippy: {what}", file=sys.stderr, flush=True)
