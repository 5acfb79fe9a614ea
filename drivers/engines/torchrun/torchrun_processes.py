"""The processes that torchrun started, as the controller sees them."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.torchrun.torchrun_worker import Leave, TorchrunWorker
from pippy.drivers.session.control import Address, Control
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.controller_connections import ControllerConnections
from pippy.drivers.wire.pickling import pickle_message


class TorchrunProcesses:
    """The worker of this process, if it hosts one, and the others by their names for RPC. ``close`` tells them to leave.

    If ``control`` has lost a worker by then, they are told which, so that each host's log says why the job ended. The
    ``connections`` lead to workers of this host.
    """

    def __init__(
        self,
        worker: TorchrunWorker | None,
        others: Sequence[str],
        timeout: float,
        control: Control,
        connections: ControllerConnections,
    ) -> None:
        self.worker, self.others, self.timeout, self.control = worker, others, timeout, control
        self.connections = connections
        self.owner, self.left = os.getpid(), False

    fixed = (
        "torchrun started the workers, and it starts all of them again, each with the script: torchrun --max-restarts 3; there "
        "driver.load(folder) goes on from the newest checkpoint"
    )

    def deaths(self) -> Mapping[int, str]:
        """Nobody says so here."""
        return {}

    def replace(self, workers: Iterable[int]) -> Mapping[int, Address]:
        """Raises."""
        raise ClusterError(self.fixed)

    def close(self) -> None:
        """Let all workers leave their scripts, and leave the group; a second call does nothing."""
        if self.left or os.getpid() != self.owner:
            return
        self.left = True
        rpc.stderr_filter.start()
        for last in (False, True):  # first all workers are told that connections will break, then they leave
            told = []
            for name in self.others:
                with suppress(ConnectionError):
                    told.append(rpc.urgent(name, pickle_message(Leave(last, self.control.lost))))
            rpc.wait_all(told, min(1.0, self.timeout))
            if not last and self.worker is not None:
                self.worker.end()  # which breaks its connections with others
        rpc.leave()
        self.connections.close()
