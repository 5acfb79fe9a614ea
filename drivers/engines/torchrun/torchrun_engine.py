"""The engine of a cluster under torchrun. The processes run already: the engine joins them, and tells them to leave."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.local.launch_config import CONTROLLER
from pippy.drivers.engines.torchrun.meeting import Meeting
from pippy.drivers.engines.torchrun.rank_info import RankInfo
from pippy.drivers.engines.torchrun.torchrun_worker import Leave, TorchrunWorker
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.controller_messages import ControllerMessages
from pippy.drivers.wire.messages.own_messages import OwnMessages
from pippy.drivers.wire.pickling import pickle_message


class TorchrunEngine:
    """The worker of this process, if it hosts one, and the others by their names for RPC. ``close`` tells them to leave.

    ``join`` has this process join the group of RPC, within so many seconds. Without ``connects_hosts`` workers of different
    hosts have no connections but RPC's. A worker is given ``timeout`` seconds to hear that it is to leave.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        worker: TorchrunWorker | None,
        met: Meeting,
        timeout: float,
        join: Callable[[float], None],
        connects_hosts: bool = True,
    ) -> None:
        self.worker, self.met, self.timeout, self._join = worker, met, timeout, join
        self.routes = met.routes
        self.owner, self.left = os.getpid(), False
        names = [rank_info.rpc_name(index) for index in range(rank_info.workers)]
        self.others = [name for name in names if name != CONTROLLER]
        first = {index: group[0] for group in met.routes.groups for index in group}
        own_messages = {} if worker is None else {rank_info.index: OwnMessages(worker.messages, worker.urgent)}
        self.messages = ControllerMessages(names, met.near, met.connections, first, connects_hosts, own_messages)

    fixed = (
        "torchrun started the workers, and it starts all of them again, each with the script: torchrun --max-restarts 3; there "
        "driver.load(folder) goes on from the newest checkpoint"
    )
    recovery_advice = f"; {fixed}"

    def start(self, timeout: float) -> Sequence[Address]:
        """Join the workers, and start that of this process."""
        if self.worker is None:
            rpc.serve_nothing()
        self._join(timeout)
        if self.worker is not None:
            self.worker.start()
        return self.met.addresses

    def deaths(self, wait: float = 0.0) -> Mapping[int, str]:
        """Nothing: torchrun does not tell which processes have died."""
        return {}

    def replace(self, workers: Iterable[int]) -> Mapping[int, Address]:
        """Raises."""
        raise ClusterError(self.fixed)

    def end(self, workers: Iterable[int]) -> None:
        """Raises."""
        raise ClusterError(self.fixed)

    def close(self, lost: str | None = None) -> None:
        """Let all workers leave their scripts, and leave the group; a second call does nothing.

        They are told which worker is lost, so that each host's log says why the job ended.
        """
        if self.left or os.getpid() != self.owner:
            return
        self.left = True
        rpc.stderr_filter.start()
        for last in (False, True):  # first all workers are told that connections will break, then they leave
            told = []
            for name in self.others:
                with suppress(ConnectionError):
                    told.append(rpc.urgent(name, pickle_message(Leave(last, lost))))
            rpc.wait_all(told, min(1.0, self.timeout))
            if not last and self.worker is not None:
                self.worker.end()  # which breaks its connections with others
        rpc.leave()
        self.met.connections.close()
