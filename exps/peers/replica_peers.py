"""Two replicas of a pipeline of two stages, on four workers: pippy's, and torch.distributed.pipelining in DDP over gloo."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exps.peers import gpt, pippy_peer
from exps.peers.contestant import Rank, Team

REPLICAS, STAGES = 2, 2
SCHEDULES = {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B"}


class DdpRank(Rank):
    """A stage of one replica, in DDP over the same stages of the others. A replica has its share of the rows."""

    def __init__(self, rank: int, store: str, name: str, size: gpt.Size) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules  # here, as the import takes two seconds

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=REPLICAS * STAGES,
            timeout=timedelta(seconds=60),
        )
        replica, index = divmod(rank, STAGES)
        lines = [dist.new_group([at * STAGES + stage for stage in range(STAGES)]) for at in range(REPLICAS)]
        twins = [dist.new_group([at * STAGES + stage for at in range(REPLICAS)]) for stage in range(STAGES)]
        part: nn.Module = gpt.part(size, index, STAGES)
        # without this DDP orders its buckets anew after the first step, and fails: it has counted each parameter twice
        wrapped = DistributedDataParallel(part, process_group=twins[index], find_unused_parameters=True)
        stage = PipelineStage(wrapped, index, STAGES, torch.device("cpu"), group=lines[replica])
        x, target = (each.tensor_split(REPLICAS)[replica] for each in gpt.batch(size))
        self.inputs = (x,) if index == 0 else ()
        self.keywords = {"target": target} if index == STAGES - 1 else {}
        kind = getattr(schedules, SCHEDULES[name])
        self.schedule = kind(stage, n_microbatches=gpt.CHUNKS // REPLICAS, loss_fn=gpt.loss_fn, scale_grads=True)
        super().__init__([part])

    def run(self) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        self.schedule.step(*self.inputs, **self.keywords, losses=losses, return_outputs=False)
        return losses


class DdpTeam(Team):
    """Four processes that meet in a private file."""

    def __init__(self, *args: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        super().__init__(REPLICAS * STAGES, DdpRank, str(Path(self._folder.name) / "store"), *args)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def torch_replicas(name: str, size: gpt.Size) -> DdpTeam:
    """torch's pipelining with a schedule of `SCHEDULES`, in DDP."""
    return DdpTeam(name, size)


def pippy_replicas(schedule: str, size: gpt.Size) -> pippy_peer.PippyTeam:
    """pippy with the schedule ``schedule`` and as many replicas."""
    pin = len(os.sched_getaffinity(0)) >= REPLICAS * STAGES or None
    given = schedule, gpt.CHUNKS, pippy_peer.GptPipe(size), gpt.batch(size), "never", pin, REPLICAS
    return pippy_peer.PippyTeam(1, pippy_peer.Controller, *given)
