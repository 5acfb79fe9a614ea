"""A model of layers in a row, cut after so many of them: what `balance` means in torchgpipe."""

import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from pippy import Pipe, PippyWarning, pipe_split, pipeline

CHANNELS = 3  # of a picture


class Layers(nn.Module):
    """Layers in a row; a mark stands before the first layer of each stage but the first.

    >>> net = Layers([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])
    >>> net.cut([1, 2])
    >>> [(index, is_first) for index, is_first, _ in net.marked()]
    [(0, False), (1, True), (2, False)]
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.cuts: frozenset[int] = frozenset()

    def cut(self, balance: Sequence[int]) -> None:
        """Give each stage so many layers."""
        if sum(balance) != len(self.layers):
            raise ValueError(f"balance={list(balance)} has {sum(balance)} layers, and the model {len(self.layers)}")
        self.cuts = frozenset(accumulate(balance[:-1]))

    def marked(self) -> Iterator[tuple[int, bool, Any]]:
        """Each layer: its number, whether a stage begins with it, and itself. The mark is set on the way."""
        for index, layer in enumerate(self.layers):
            if index in self.cuts:
                pipe_split()
            yield index, index in self.cuts, layer


def cut_into(model: Layers, balance: Sequence[int], loss_fn: Any) -> Pipe:
    """The Pipe of a model whose stages have so many layers."""
    model.cut(balance)
    with warnings.catch_warnings():
        if len(balance) == 1:  # on purpose
            warnings.simplefilter("ignore", PippyWarning)
        return pipeline(model, loss_fn)


def parameters(model: nn.Module) -> int:
    """How many numbers the parameters have."""
    return sum(parameter.numel() for parameter in model.parameters())


def printed(count: int) -> str:
    """A number of parameters as the papers print it.

    >>> printed(362_216_000), printed(15_819_000_000)
    ('362.2M', '15.82B')
    """
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def pictures(rows: int, side: int, device: str = "cpu") -> torch.Tensor:
    """Square pictures of noise."""
    return torch.rand(rows, CHANNELS, side, side, device=device)
