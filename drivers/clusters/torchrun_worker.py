"""A worker in a process that pippy did not start: how it is run there, when it ends, and when it ends itself."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from pippy.drivers.control.messages import GiveUp
from pippy.drivers.transport import rpc
from pippy.drivers.transport.message_queue import Ended, MessageQueue
from pippy.drivers.transport.rpc_transport import RpcTransport
from pippy.drivers.workers.worker import Worker
from pippy.drivers.workers.worker_context import WorkerContext

EVERYTHING = GiveUp(first=0, last=1 << 62)


@dataclass(frozen=True)
class Leave:
    """Urgent: the controller closes the cluster. First all workers are told to expect broken connections.

    Then, with ``now``, they are told to leave.

    >>> Leave(now=True)
    Leave(now=True)
    """

    now: bool


class TorchrunWorker:
    """A worker, on the thread that calls ``run``, or on one of its own after ``start``.

    ``peer`` gives the RPC name of the process that hosts a worker.
    """

    def __init__(
        self,
        index: int,
        names: Sequence[str],
        device: str,
        peer: Callable[[int], str],
        threads: int | None = None,
        shares_process: bool = False,
    ) -> None:
        self.messages, self.threads = MessageQueue(), threads
        torch.empty(0, device=device)  # a device that does not work fails here
        self.transport = RpcTransport(index, lambda to, key, value: rpc.deliver(peer(to), key, value), device=device)
        context = WorkerContext(
            index,
            tuple(names),
            self.messages,
            self.transport,
            device,
            threads or torch.get_num_threads(),
            shares_process,
        )
        self.worker = Worker(context)
        self.name = names[index]
        self.thread: threading.Thread | None = None
        rpc.serve(rpc.Served(self.messages, self.urgent, self.transport.deliver))

    def run(self) -> None:
        """Obey until the controller says to leave."""
        if self.threads:
            torch.set_num_threads(self.threads)  # which torch keeps for each thread
        with suppress(Ended):
            self.worker.run()

    def start(self) -> None:
        """Run on a thread beside the controller's."""
        self.thread = threading.Thread(target=self.run, name=f"pippy {self.name}", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Give up what is under way and let ``run`` return; waits a little for a thread that `start` has started."""
        self.worker.urgent(EVERYTHING)
        self.messages.end()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(1.0)

    def urgent(self, message: Any) -> Any:
        """Answer at once, on a thread that is not the worker's own."""
        if not isinstance(message, Leave):
            return self.worker.urgent(message)
        rpc.stderr_filter.start()
        if message.now:
            self.end()
            # Whatever a stage computes, the process ends soon.
            timer = threading.Timer(5.0, os._exit, (0,))
            timer.daemon = True
            timer.start()
        return None

    def watch(self, controller: str, timeout: float) -> None:
        """End this process when the controller is gone: at once if the connection to it breaks.

        If the network is cut, nothing breaks. So while the worker waits inside a step, it asks now and then whether the
        controller is there, and after 3 × timeout + 10 s at the most it knows. An idle worker asks nothing and waits
        for as long as the controller likes.
        """
        rpc.watch(controller, lambda: self._gone("the connection to the controller broke"))
        threading.Thread(target=self._ask, args=(controller, timeout), daemon=True).start()

    def _ask(self, controller: str, timeout: float) -> None:
        pause = threading.Event()
        while not pause.wait(2 * timeout + 10):
            in_step = self.worker.command is not None and self.transport.waiting_for() is not None
            if in_step and not answers(controller, timeout):
                self._gone(f"the controller left a ping unanswered for {timeout:g} s")

    def _gone(self, why: str) -> None:
        if not self.messages.ended:
            end_process(f"worker {self.name!r} (pid {os.getpid()}) ends itself: {why}")


def answers(controller: str, timeout: float) -> bool:
    """Whether a process answers a ping in time."""
    try:
        ping = rpc.ping(controller)
    except ConnectionError:
        return False
    rpc.wait_all([ping], timeout)
    return ping.done()


def end_process(why: str) -> NoReturn:
    """At once: the main thread may compute, or wait for what will never come."""
    rpc.stderr_filter.stop()
    print(f"pippy: {why}", file=sys.stderr, flush=True)
    os._exit(1)
