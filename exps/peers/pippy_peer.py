"""pippy's own drivers as contestants. A step is timed from the call of the controller to its return.

A process has one cluster open at a time, so each controller has a process of its own. It is not pinned, and shares the
cores with its workers, as a user's script does. On several hosts there is a process on each, as under torchrun: the first
has the controller and a worker, and each has one core.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Literal, NamedTuple

import torch

from exps.peers import gpt
from exps.peers.contestant import Rank, Team
from exps.peers.hosts import Host
from exps.peers.process import Child, ChildFailed
from pippy import Pipe, PipelineDriver, SplitPoint, annotate_split_points, cluster, pipeline

WORKERS = 2
_ports = itertools.count(29700)

# the schedules, and how many stages each worker holds
SCHEDULES = {
    "fill_drain": 1,
    "1f1b": 1,
    "eager_1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "zb_h1": 1,
    "zb_v": 2,
    "v_half": 2,
    "v_min": 2,
    "dualpipe_v": 2,
}


class GptPipe(NamedTuple):
    """Makes the Pipe of a model of this size in so many stages; unlike a lambda it can be sent to a process."""

    size: gpt.Size

    def __call__(self, stages: int) -> Pipe:
        model = gpt.model(self.size)
        annotate_split_points(model, dict.fromkeys(gpt.cuts(self.size, stages), SplitPoint.BEGINNING))
        return pipeline(model, gpt.loss_fn)


class Controller(Rank):
    """One cluster of so many workers for each replica of the pipeline, one driver, one schedule."""

    def __init__(
        self,
        rank: int,
        schedule: str,
        chunks: int,
        pipe_of: Callable[[int], Pipe],
        batch: tuple[torch.Tensor, torch.Tensor],
        checkpoint: str = "never",
        pin: bool | None = True,
        replicas: int = 1,
        workers: int = WORKERS,
        compile: bool | str = False,
        engine: Literal["local", "ray"] | None = None,
    ) -> None:
        super().__init__([])
        self._chunks, self._batch = chunks, batch
        pipe = pipe_of(workers * SCHEDULES[schedule])
        self._names = [name for name, _ in pipe.named_parameters()]
        with ExitStack() as opened:
            opened_cluster = opened.enter_context(cluster(workers * replicas, threads=1, pin=pin, engine=engine))
            given = {"schedule": schedule, "checkpoint": checkpoint, "replicas": replicas, "compile": compile}
            self._driver = PipelineDriver(pipe, opened_cluster, **given)  # type: ignore[arg-type]
            self._opened = opened.pop_all()

    def prepare(self) -> None:
        self._driver.zero_grad()

    def run(self) -> list[torch.Tensor]:
        return [self._driver.run(self._chunks, *self._batch)]

    def pids(self) -> list[int]:
        return [address.pid for address in self._driver.cluster.session.workers]

    def gradients(self) -> dict[str, torch.Tensor]:
        found = self._driver.gradients(self._names)
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def close(self) -> None:
        self._opened.close()


class PippyTeam(Team):
    """A controller in a process of its own, on any core; the cluster starts and ends with it."""

    def core_of(self, rank: int) -> int | None:
        return None

    def close(self) -> None:
        with suppress(ChildFailed):  # a controller that failed or died has no cluster to close
            self._all("close")
        super().close()


def pippy_peer(schedule: str, size: gpt.Size, checkpoint: str = "never", compile: bool | str = False) -> PippyTeam:
    """pippy with the schedule ``schedule`` of `SCHEDULES`."""
    given = partial(Controller, compile=compile)
    return PippyTeam(1, given, schedule, gpt.CHUNKS, GptPipe(size), gpt.batch(size), checkpoint)


def member(
    rank: int,
    address: str,
    port: int,
    schedule: str,
    chunks: int,
    pipe_of: Callable[[int], Pipe],
    batch: tuple[torch.Tensor, torch.Tensor],
) -> Controller:
    """The process of a rank, as torchrun would start it. In that of a worker this does not return until the cluster closes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORKERS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if rank:
        cluster(WORKERS, threads=1)
    return Controller(rank, schedule, chunks, pipe_of, batch, pin=None)


class JoinedTeam(PippyTeam):
    """A worker on each of two hosts; the controller is on the first."""

    def start(self) -> None:
        port = next(_ports)  # several contestants are there at a time
        for rank, host in enumerate(self._hosts):
            assert host is not None and self._hosts[0] is not None
            args = rank, self._hosts[0].address, port, *self._args
            child = Child(rank, member, *args, keep_memory=self._keep_memory, host=host)
            if rank == 0:
                self._children.append(child)
            else:
                self._worker = child  # which answers nobody but the controller

    def close(self) -> None:
        super().close()
        self._worker.close()


def on_hosts(schedule: str, size: gpt.Size, hosts: Sequence[Host]) -> JoinedTeam:
    """pippy with the schedule ``schedule`` of `SCHEDULES`, a worker on each of two hosts."""
    return JoinedTeam(WORKERS, member, schedule, gpt.CHUNKS, GptPipe(size), gpt.batch(size), hosts=hosts)
