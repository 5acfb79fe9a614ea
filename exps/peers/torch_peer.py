"""torch.distributed.pipelining over gloo, one process for each worker."""

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from exps.peers import gpt
from exps.peers.contestant import Rank, Team
from exps.peers.hosts import LINK, Host

WORKERS = 2


class Peer(NamedTuple):
    """A schedule of torch, by its name, and which stages it wants on each worker."""

    schedule: str
    stages_per_worker: int = 1
    v: bool = False

    def stages_of(self, rank: int, workers: int = WORKERS) -> list[int]:
        """The stages of a worker.

        >>> SCHEDULES["DualPipeV"].stages_of(0), SCHEDULES["LoopedBFS"].stages_of(0)
        ([0, 3], [0, 2])
        """
        if self.v:
            return [rank, 2 * workers - 1 - rank]
        return [rank + turn * workers for turn in range(self.stages_per_worker)]


SCHEDULES = {
    "GPipe": Peer("ScheduleGPipe"),
    "1F1B": Peer("Schedule1F1B"),
    "Interleaved1F1B": Peer("ScheduleInterleaved1F1B", 2),
    "LoopedBFS": Peer("ScheduleLoopedBFS", 2),
    "InterleavedZeroBubble": Peer("ScheduleInterleavedZeroBubble", 2),
    "ZBVZeroBubble": Peer("ScheduleZBVZeroBubble", 2, v=True),
    "DualPipeV": Peer("ScheduleDualPipeV", 2, v=True),
}

Parts = Callable[[int, int], nn.Module]


class TorchRank(Rank):
    """The stages of one worker under one schedule; ``part(stage, stages)`` makes a stage."""

    def __init__(
        self,
        rank: int,
        store: str,
        name: str,
        chunks: int,
        part: Parts,
        batch: tuple[torch.Tensor, torch.Tensor],
        loss_fn: Callable[..., torch.Tensor],
        link: str = "lo",
        workers: int = WORKERS,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules  # here, as the import takes two seconds

        os.environ["GLOO_SOCKET_IFNAME"] = link
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers, timeout=limit)
        peer = SCHEDULES[name]
        count, mine, device = peer.stages_per_worker * workers, peer.stages_of(rank, workers), torch.device("cpu")
        stages = [PipelineStage(part(index, count), index, count, device) for index in mine]
        self.inputs = batch[:1] if 0 in mine else ()
        self.keywords = {"target": batch[1]} if count - 1 in mine else {}
        # the loss is a mean, so gradients are divided by the number of micro-batches
        given = stages if peer.stages_per_worker > 1 else stages[0]
        kind = getattr(schedules, peer.schedule)
        self.schedule = kind(given, n_microbatches=chunks, loss_fn=loss_fn, scale_grads=True)
        super().__init__([stage.submod for stage in stages])

    def run(self) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        self.schedule.step(*self.inputs, **self.keywords, losses=losses, return_outputs=False)
        return losses


class GptParts(NamedTuple):
    """Makes the stages of a model of this size; unlike a lambda it can be sent to a process."""

    size: gpt.Size
    again: bool = False

    def __call__(self, stage: int, stages: int) -> nn.Module:
        return gpt.part(self.size, stage, stages, self.again)


class CompiledParts(NamedTuple):
    """Makes stages as ``parts`` does, and has torch compile each when it is first called."""

    parts: Parts

    def __call__(self, stage: int, stages: int) -> nn.Module:
        from torch._functorch import config  # slow to import

        config.donated_buffer = False  # else its backward fails if it comes in halves
        made = self.parts(stage, stages)
        made.compile()
        return made


class TorchTeam(Team):
    """Processes that meet in a private file."""

    def __init__(
        self, name: str, *args: Any, keep_memory: bool = False, hosts: Sequence[Host] = (), workers: int = WORKERS
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store, link = str(Path(self._folder.name) / "store"), LINK if hosts else "lo"
        args = store, name, *args, link, workers
        super().__init__(workers, TorchRank, *args, keep_memory=keep_memory, hosts=hosts)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def torch_peer(
    name: str,
    size: gpt.Size,
    keep_memory: bool = False,
    again: bool = False,
    hosts: Sequence[Host] = (),
    compile: bool = False,
) -> TorchTeam:
    """torch's pipelining with the schedule ``name`` of `SCHEDULES`; ``again``: its blocks in torch.utils.checkpoint.

    With ``hosts`` each rank is on one of them. With ``compile`` torch compiles each stage when it is first called.
    """
    parts: Parts = GptParts(size, again).__call__
    given = CompiledParts(parts).__call__ if compile else parts, gpt.batch(size), gpt.loss_fn
    return TorchTeam(name, gpt.CHUNKS, *given, keep_memory=keep_memory, hosts=hosts)
