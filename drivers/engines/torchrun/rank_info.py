"""The rank of this process under torchrun, and the worker that it hosts."""

import os
from dataclasses import dataclass

from pippy.drivers.engines.local.launch_config import CONTROLLER


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, of those that torchrun has started. Rank 0 is the controller, and hosts worker 0 or none.

    >>> rank_info = RankInfo(rank=2, world_size=3, local_rank=2, local_world_size=3, controller_hosts=False)
    >>> rank_info.index, rank_info.workers, rank_info.rpc_name(rank_info.index)
    (1, 2, 'worker1')
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    controller_hosts: bool

    @staticmethod
    def from_environment(controller_hosts: bool) -> "RankInfo":
        """From the environment variables that torchrun sets."""
        environment = os.environ
        local = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
        return RankInfo(int(environment["RANK"]), int(environment["WORLD_SIZE"]), *local, controller_hosts)

    @property
    def one_host(self) -> bool:
        """Whether one torchrun has started all ranks."""
        return self.local_world_size == self.world_size

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.world_size - (not self.controller_hosts)

    @property
    def index(self) -> int:
        """The number of the worker in this process; -1 if there is none."""
        return self.rank - (not self.controller_hosts)

    def rank_of(self, worker: int) -> int:
        """The rank that hosts a worker."""
        return worker + (not self.controller_hosts)

    def worker_of(self, rank: int) -> int:
        """The worker that a rank hosts; -1 if it hosts none."""
        return rank - (not self.controller_hosts)

    def rpc_name(self, worker: int) -> str:
        """The name for RPC of the process that hosts a worker."""
        return f"worker{worker}" if self.rank_of(worker) else CONTROLLER
