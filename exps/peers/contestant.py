"""What the harness asks of a contestant, and the contestants that are made of children."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from exps.peers.hosts import Host
from exps.peers.process import Child


class Contestant(ABC):
    """Trains the model for one step when told, and costs nothing while it is not."""

    @abstractmethod
    def start(self) -> None:
        """Start what it needs."""

    @abstractmethod
    def step(self) -> float:
        """Seconds for the forward and backward of all micro-batches, from empty gradients."""

    @abstractmethod
    def loss(self) -> float:
        """The loss of the last step."""

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the last step."""

    @abstractmethod
    def close(self) -> None:
        """End what was started."""


class Rank:
    """One process of a contestant: what runs in a child.

    ``run`` does the rank's share of a step and gives the losses that it computed. The clock is the machine's: its times
    can be compared between processes.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.losses: list[torch.Tensor] = []

    def run(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def prepare(self) -> None:
        for module in self.modules:
            module.zero_grad(set_to_none=True)

    def step(self) -> tuple[float, float]:
        begin = time.perf_counter()
        self.losses = self.run()
        return begin, time.perf_counter()

    def pids(self) -> list[int]:
        """The processes that hold parts of the model."""
        return [os.getpid()]

    def loss(self) -> list[float]:
        return [loss.item() for loss in self.losses]

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.grad
            for module in self.modules
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }


class Team(Contestant):
    """A contestant of several children, one on each core, and on each of ``hosts``: ``make(rank, *args)`` gives each `Rank`.

    A step begins when rank 0 begins and all are prepared, and ends when the last is done: no barrier is timed.
    """

    def __init__(
        self,
        ranks: int,
        make: Callable[..., Rank],
        *args: Any,
        keep_memory: bool = False,
        hosts: Sequence[Host | None] = (),
    ) -> None:
        self._ranks, self._make, self._args, self._keep_memory = ranks, make, args, keep_memory
        self._hosts = [*hosts] or [None] * ranks
        self._children: list[Child] = []

    def start(self) -> None:
        for rank in range(self._ranks):
            core, host = self.core_of(rank), self._hosts[rank]
            child = Child(core, self._make, rank, *self._args, keep_memory=self._keep_memory, host=host)
            self._children.append(child)

    def core_of(self, rank: int) -> int | None:
        """The one core of a rank, or None for any."""
        cores = sorted(os.sched_getaffinity(0))
        return cores[rank % len(cores)]

    def step(self) -> float:
        self._all("prepare")
        # rank 0 last: the others are at their first receive when it begins
        for child in reversed(self._children):
            child.ask("step")
        times = [child.answer() for child in self._children]
        return max(end for _, end in times) - times[0][0]

    def loss(self) -> float:
        losses = [loss for each in self._all("loss") for loss in each]
        return sum(losses) / len(losses) if losses else float("nan")

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: gradient for each in self._all("gradients") for name, gradient in each.items()}

    def pids(self) -> list[int]:
        """The processes that hold parts of the model, worker by worker."""
        return [pid for each in self._all("pids") for pid in each]

    def close(self) -> None:
        while self._children:
            self._children.pop().close()

    def _all(self, method: str) -> list[Any]:
        for child in self._children:
            child.ask(method)
        return [child.answer() for child in self._children]
