"""Contestants that compute on given devices: the plain model, torch.distributed.pipelining, and pippy's drivers.

Each ends its step when its devices are done.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from exps.peers import gpt
from exps.peers.contestant import Rank, Team
from exps.peers.pippy_peer import GptPipe
from pippy import PipelineDriver, local_cluster, pipe_split, pipeline

WORKERS = 2


def wait_for(device: torch.device) -> None:
    """Wait until a device has computed all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class OnDevice(Rank):
    """A process that computes on one device itself."""

    def __init__(self, device: torch.device, modules: list[nn.Module]) -> None:
        super().__init__(modules)
        self.device = device

    def step(self) -> tuple[float, float]:
        begin, _ = super().step()
        wait_for(self.device)
        return begin, perf_counter()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: gradient.cpu() for name, gradient in super().gradients().items()}


class PlainRank(OnDevice):
    """The whole model on one device, micro-batch after micro-batch."""

    def __init__(self, rank: int, size: gpt.Size, device: str) -> None:
        place = torch.device(device)
        self.model = gpt.model(size).to(place)
        self.chunks = list(zip(*(each.to(place).chunk(gpt.CHUNKS) for each in gpt.batch(size))))
        super().__init__(place, [self.model])

    def run(self) -> list[torch.Tensor]:
        return gpt.accumulated(self.model, self.chunks)


class TorchRank(OnDevice):
    """torch's 1F1B: a stage for each process, or both of them in one, as NCCL takes no two processes on one GPU."""

    def __init__(self, rank: int, store: str, size: gpt.Size, devices: tuple[str, ...]) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules  # here, as the import takes two seconds

        place = torch.device(devices[rank])
        if place.type != "cpu":
            torch.accelerator.set_device_index(place)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo" if place.type == "cpu" else "nccl",
            init_method=f"file://{store}",
            rank=rank,
            world_size=len(devices),
            timeout=timedelta(seconds=120),
        )
        mine = range(rank, WORKERS, len(devices))
        stages: list[Any] = [
            PipelineStage(gpt.part(size, each, WORKERS).to(place), each, WORKERS, place) for each in mine
        ]
        x, target = (each.to(place) for each in gpt.batch(size))
        self.inputs = (x,) if 0 in mine else ()
        self.keywords = {"target": target} if WORKERS - 1 in mine else {}
        options: dict[str, Any] = {"n_microbatches": gpt.CHUNKS, "loss_fn": gpt.loss_fn, "scale_grads": True}
        if len(mine) == 1:
            self.schedule: Any = schedules.Schedule1F1B(stages[0], **options)
        else:
            self.schedule = schedules.ScheduleInterleaved1F1B(stages, **options)
        super().__init__(place, [stage.submod for stage in stages])

    def run(self) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        self.schedule.step(*self.inputs, **self.keywords, losses=losses, return_outputs=False)
        return losses


class PippyRank(Rank):
    """A cluster with a worker for each device, and a driver; one worker has both stages."""

    def __init__(self, rank: int, size: gpt.Size, devices: tuple[str, ...], schedule: str) -> None:
        super().__init__([])
        self._batch = gpt.batch(size)
        pipe = GptPipe(size)(WORKERS)
        self._names = [name for name, _ in pipe.named_parameters()]
        with ExitStack() as opened:
            cluster = opened.enter_context(local_cluster(len(devices), threads=1, devices=devices))
            self._driver = PipelineDriver(pipe, cluster, schedule=schedule)
            self._opened = opened.pop_all()

    def prepare(self) -> None:
        self._driver.zero_grad()

    def run(self) -> list[torch.Tensor]:
        return [self._driver.run(gpt.CHUNKS, *self._batch)]

    def peaks(self) -> list[tuple[int, int]]:
        """What each worker holds at its peak in a step: counted before it runs, and measured while it ran."""
        counted = self._driver.memory(gpt.CHUNKS, *self._batch).peaks
        self._driver.zero_grad()
        with self._driver.record(memory=True) as recording:
            self.run()
        return list(zip(counted, recording.steps[-1].held_peaks))

    def gradients(self) -> dict[str, torch.Tensor]:
        found = self._driver.gradients(self._names)
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def close(self) -> None:
        self._opened.close()


class Wide(nn.Module):
    """A number for each row goes in and out, and ``width`` numbers for each row from one worker to the next."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.expand(x.shape[0], self.width) + 1.0
        pipe_split()
        return y[:, :1] + 1.0


class TransferRank(Rank):
    """Two workers, of which one sends values of so many bytes to the other, 8 in a step."""

    def __init__(self, rank: int, devices: tuple[str, ...], nbytes: int) -> None:
        super().__init__([])
        with ExitStack() as opened:
            cluster = opened.enter_context(local_cluster(WORKERS, threads=1, devices=devices))
            self._cluster = cluster
            self._driver = PipelineDriver(pipeline(Wide(nbytes // 4)), cluster)
            self._opened = opened.pop_all()

    def run(self) -> list[torch.Tensor]:
        with torch.no_grad():
            self.output = self._driver.run(gpt.CHUNKS, torch.zeros(gpt.CHUNKS, 1))
        assert (self.output == 2).all()
        return []

    def way(self) -> str:
        """How the values go now."""
        return self._cluster.routes.between(0, 1)

    def close(self) -> None:
        self._opened.close()


class DeviceTeam(Team):
    """Processes on any core: those that use a GPU have threads of the driver beside their own."""

    def core_of(self, rank: int) -> int | None:
        return None

    def way(self) -> str:
        """As `TransferRank.way`."""
        return str(self._all("way")[0])

    def peaks(self) -> list[tuple[int, int]]:
        """As `PippyRank.peaks`."""
        return [pair for each in self._all("peaks") for pair in each]


class MeetingTeam(DeviceTeam):
    """Processes that meet in a private file, whose path is their first argument."""

    def __init__(self, ranks: int, make: Callable[..., Rank], *args: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        super().__init__(ranks, make, str(Path(self._folder.name) / "store"), *args)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()
