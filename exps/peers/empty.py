"""A model whose stages do nothing: what is left of a step is what it costs to run the schedule.

In a file of its own, and not in that of the command: a child must find these classes by name.
"""

import os
from typing import NamedTuple

import torch
from torch import nn

from exps.peers.pippy_peer import Controller, PippyTeam
from exps.peers.torch_peer import TorchTeam
from pippy import Pipe


class Empty(nn.Module):
    """The identity, but for one number that training would change."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class EmptyParts(NamedTuple):
    """Makes empty stages."""

    def __call__(self, stage: int, stages: int) -> nn.Module:
        return Empty()


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As little as a loss can be."""
    return (output - target).mean()


class EmptyPipe(NamedTuple):
    """Makes a Pipe of empty stages."""

    def __call__(self, stages: int) -> Pipe:
        return Pipe.from_sequential(nn.Sequential(*(Empty() for _ in range(stages))), loss_fn)


def batch(chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One number for each micro-batch, and its target."""
    return torch.zeros(chunks, 1), torch.ones(chunks, 1)


def pippy_control(name: str, chunks: int, workers: int = 2) -> PippyTeam:
    """pippy's schedule ``name`` with empty stages. Workers are pinned if there is a core for each."""
    pin = workers <= len(os.sched_getaffinity(0))
    return PippyTeam(1, Controller, name, chunks, EmptyPipe(), batch(chunks), "never", pin, 1, workers)


def torch_control(name: str, chunks: int, workers: int = 2) -> TorchTeam:
    """torch's schedule ``name`` with empty stages; each micro-batch is one number."""
    return TorchTeam(name, chunks, EmptyParts(), batch(chunks), loss_fn, workers=workers)
