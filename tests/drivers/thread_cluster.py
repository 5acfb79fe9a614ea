"""The engine whose workers are threads of this process: for tests that need workers and no processes, and for a debugger.

Nothing is started, sent or listened to, and all can be looked into. Python's lock lets one thread run at a time, and all
share the generators of random numbers of torch.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from pippy.drivers.base.errors import RECOVERY_ADVICE, ClusterError
from pippy.drivers.engines.arguments import worker_names
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.engine import start
from pippy.drivers.engines.routes import Routes
from pippy.drivers.protocol.commands import GIVE_UP_ALL
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.gpu.copies import Accelerator, DeviceCopies
from pippy.drivers.wire.gpu.device_transport import DeviceTransport
from pippy.drivers.wire.messages.controller_messages import ControllerConnections, OwnMessages
from pippy.drivers.wire.messages.worker_messages import Ended, MessageQueue
from pippy.drivers.wire.worker_transport import in_process
from pippy.drivers.worker import handlers
from pippy.drivers.worker.worker import Worker
from pippy.drivers.worker.worker_context import WorkerContext
from pippy.ir.run.random_state import RandomState

_ENDS_WITHIN = 10.0  # seconds


class ThreadEngine:
    """Workers with these names, each on a thread. Each computes on its accelerator, if some are given."""

    fixed = "the workers are threads of this process, which do not die alone"
    recovery_advice = RECOVERY_ADVICE
    device_type = "cpu"

    def __init__(
        self,
        names: Sequence[str],
        accelerators: Sequence[Accelerator | None] | None = None,
        worker: Callable[[WorkerContext], Any] = Worker,
    ) -> None:
        self.names = tuple(names)
        copies = [DeviceCopies(each) if each else None for each in accelerators or [None] * len(names)]
        self.devices = tuple("simulated" if each else "cpu" for each in copies)
        near = {index for index, each in enumerate(copies) if each}
        transports = [
            carrier if device_copies is None else DeviceTransport(carrier, device_copies, near - {index})
            for index, (carrier, device_copies) in enumerate(zip(in_process(len(names)), copies))
        ]
        self.contexts = [
            WorkerContext(index, self.names, MessageQueue(), transport, "cpu", 1, True, device_copies)
            for index, (transport, device_copies) in enumerate(zip(transports, copies))
        ]
        self.workers = [worker(context) for context in self.contexts]
        messages = [OwnMessages(context.messages, each.urgent) for context, each in zip(self.contexts, self.workers)]
        self.messages = ControllerConnections(own=dict(enumerate(messages)))
        self.routes = Routes.of_host(self.names, "here", self.devices)
        self._threads = [
            threading.Thread(target=_run, args=(each,), name=f"pippy {name}", daemon=True)
            for name, each in zip(names, self.workers)
        ]

    def start(self, timeout: float) -> Sequence[Address]:
        """Start the threads."""
        for each in self._threads:
            each.start()
        return [Address(name, socket.gethostname(), os.getpid()) for name in self.names]

    def deaths(self, wait: float = 0.0) -> Mapping[int, str]:
        """The workers whose threads have ended before their time."""
        ended = {index for index, each in enumerate(self._threads) if each.ident is not None and not each.is_alive()}
        return {index: "its thread has ended" for index in ended if not self.contexts[index].messages.ended}

    def replace(self, workers: Iterable[int]) -> Mapping[int, Address]:
        """Raise: a thread cannot be ended, so no other takes its place."""
        raise ClusterError(self.fixed)

    def end(self, workers: Iterable[int]) -> None:
        """Raise: a thread cannot be ended."""
        raise ClusterError(self.fixed)

    def close(self, lost: str | None = None) -> None:
        """Give up what the workers do, and end their threads. Raises if one goes on computing."""
        contexts, self.contexts = self.contexts, []
        for worker, context in zip(self.workers, contexts):
            worker.urgent(GIVE_UP_ALL)
            context.messages.end()
        for thread, context in zip(self._threads, contexts):
            thread.join(_ENDS_WITHIN)
            if thread.is_alive():
                raise ClusterError(
                    f"the thread of worker {context.name!r} goes on {_ENDS_WITHIN:g} s after its cluster was closed"
                )
            context.transport.close()
            context.messages.close()


def thread_cluster(n: int, accelerators: Sequence[Accelerator | None] | None = None) -> Cluster:
    """A cluster whose ``n`` workers are threads of this process. Each computes on its accelerator, if some are given."""
    engine = ThreadEngine(worker_names(n, None), accelerators)
    session = start(engine, 5.0, 60.0)
    return Cluster(engine.names, session, engine)


def _run(worker: Any) -> None:
    torch.get_num_threads()  # a new thread multiplies with the number that the process has set only once it has asked for it
    with suppress(Ended):
        worker.run()


@contextmanager
def as_on_hosts(cluster, hosts):
    """Inside, the workers of a cluster of threads take themselves for those of these hosts, as "a a b b" names them."""
    routes = cluster.engine.routes
    cluster.engine.routes = replace(routes, hosts=tuple(hosts.split()))
    try:
        yield cluster
    finally:
        cluster.engine.routes = routes


@contextmanager
def one_draws_at_a_time():
    """Inside, workers that are threads compute in turn, as they share the generators of the process.

    Else one may seed them between the seed and the draw of another: its dropout draws other numbers than when it is repeated.
    """
    lock = threading.RLock()

    def alone(inner):
        def locked(*args, **kwargs):
            with lock:
                return inner(*args, **kwargs)

        return locked

    with (
        patch.object(handlers, "computation", alone(handlers.computation)),
        patch.object(RandomState, "restore", alone(RandomState.restore)),
    ):
        yield
