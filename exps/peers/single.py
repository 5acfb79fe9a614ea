"""The two measures: one process that does all the work (1b), and two that do half of it each and never speak."""

import torch

from exps.peers import gpt
from exps.peers.contestant import Rank, Team


class SingleRank(Rank):
    """The whole model, micro-batch after micro-batch, gradients accumulated."""

    def __init__(self, rank: int, size: gpt.Size) -> None:
        self.model, (x, target) = gpt.model(size), gpt.batch(size)
        self.chunks = list(zip(x.chunk(gpt.CHUNKS), target.chunk(gpt.CHUNKS)))
        super().__init__([self.model])

    def run(self) -> list[torch.Tensor]:
        return gpt.accumulated(self.model, self.chunks)


class BoundRank(Rank):
    """Half of the model, on inputs and gradients that are there from the start."""

    def __init__(self, rank: int, size: gpt.Size) -> None:
        self.first, self.model = rank == 0, gpt.part(size, rank, 2)
        tokens, target = gpt.batch(size)
        hidden = torch.randn(gpt.BATCH, size.length, size.width)
        self.inputs = (tokens if self.first else hidden).chunk(gpt.CHUNKS)
        self.others = (hidden if self.first else target).chunk(gpt.CHUNKS)
        super().__init__([self.model])

    def run(self) -> list[torch.Tensor]:
        for x, other in zip(self.inputs, self.others):
            if self.first:
                self.model(x).backward(other)
            else:
                # the gradient of the input is what would be sent
                loss = gpt.loss_fn(self.model(x.detach().requires_grad_()), other)
                (loss / gpt.CHUNKS).backward()
        return []


def single(size: gpt.Size, keep_memory: bool = False) -> Team:
    """1b: the loss and the gradients that every other contestant is held to."""
    return Team(1, SingleRank, size, keep_memory=keep_memory)


def bound(size: gpt.Size, keep_memory: bool = False) -> Team:
    """The least that two cores need when neither ever waits; it trains nothing."""
    return Team(2, BoundRank, size, keep_memory=keep_memory)
