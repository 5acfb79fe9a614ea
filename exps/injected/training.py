"""What the campaign's controllers train, and the faults that happen to it."""

import copy
import os
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from exps.injected.kinds import RAISES
from pippy import Pipe
from pippy.drivers.driver.drivers import PipelineDriver
from pippy.drivers.engines.cluster import Cluster
from tests.drivers import failing_model

SCHEDULES = ["fill_drain", "1f1b", "interleaved_1f1b", "zb_h1", "looped_bfs"]
STAGES, ROWS = 4, 8


@dataclass
class Report:
    """One fault: how soon it was noticed, and what was wrong about that."""

    kind: str
    seconds: float
    wrong: str = ""
    ended: float = 0.0  # when the script was told, for a fault that the watcher of the script causes
    ends: bool = False  # whether the cluster has lost a worker by it, though most such faults end none


class Refuses(torch.optim.SGD):
    """An optimizer that fails."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Fail."""
        raise ArithmeticError("an optimizer that fails")


class Unreadable(torch.nn.Linear):
    """Can be pickled, and not be unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ArithmeticError("a module that cannot be read")


class Training:
    """A driver, and the same model without a pipeline."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.chunks = rng.choice([4, 8])
        self.width = rng.choice([8, 200])  # small values travel in packets, large ones in rings
        self.plain = failing_model.Trapped(STAGES, self.width)
        self.schedule = rng.choice(SCHEDULES)
        workers = 4 if self.schedule == "zb_h1" else len(cluster)
        self.schedule = self.schedule if workers <= len(cluster) else "1f1b"
        pipe = failing_model.trapped_pipe(copy.deepcopy(self.plain))
        self.driver = PipelineDriver(pipe, cluster, schedule=self.schedule)

    def step(self) -> None:
        """A good step on both sides."""
        x, target = self.data(), self.data()
        loss = F.mse_loss(self.plain(x, failing_model.no_orders(ROWS)), target)
        mine = self.driver.run(self.chunks, x, failing_model.no_orders(ROWS), target)
        loss.backward()
        torch.testing.assert_close(mine, loss.detach(), rtol=1e-9, atol=0)

    def data(self) -> torch.Tensor:
        """An input, or a target."""
        return torch.randn(ROWS, self.width)

    def start(self) -> Any:
        """Send a step."""
        return self.driver.run_async(self.chunks, self.data(), failing_model.no_orders(ROWS), self.data())

    def run(self, given: torch.Tensor | None = None) -> None:
        """A step that nobody compares."""
        given = failing_model.no_orders(ROWS) if given is None else given
        self.driver.run(self.chunks, self.data(), given, self.data())

    def fail(self, kind: str) -> Any:
        """Start a step that fails, perhaps among others."""
        if kind == "optimizer":
            return self.driver.instantiate_optimizer(Refuses, lr=0.1).step()
        if kind == "load":
            bad = torch.nn.Sequential(torch.nn.Linear(8, 8), Unreadable(8, 8))
            return PipelineDriver(Pipe.from_sequential(bad), self.cluster)
        row, target = self.rng.randrange(ROWS), self.data()
        trap = 0 if kind == "weight half" else self.rng.randrange(STAGES - 1)
        if kind == "loss":
            target[row] = torch.nan
        given = failing_model.orders(ROWS, trap, RAISES[kind], row)
        if self._stays(kind, trap):
            return self.fail(kind)
        step = self.driver.run_async(self.chunks, self.data(), given, target)
        more = self.rng.randrange(3)
        for _ in range(more):
            self.start()
        return step.result()

    def traps_elsewhere(self) -> list[int]:
        """The stages that are not in this process, as they are with worker 0 under torchrun."""
        pids = [worker.pid for worker in self.cluster.session.workers]
        return [stage for stage in range(STAGES) if pids[self.driver.placed.ranks[stage]] != os.getpid()]

    def _stays(self, kind: str, trap: int) -> bool:
        """Whether the value that cannot be sent stays on its worker."""
        return kind in ("send", "unreadable") and self.driver.placed.ranks[trap] == self.driver.placed.ranks[trap + 1]

    def check(self) -> None:
        """The gradients are those of the good steps."""
        for name, gradient in self.driver.gradients().items():
            torch.testing.assert_close(gradient, self.plain.get_parameter(name).grad, rtol=1e-8, atol=1e-11)
