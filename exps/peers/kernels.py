"""Work for one core, of several kinds. In a file of its own: a child must find these classes by name."""

from collections.abc import Callable

import torch
from torch import nn

from exps.peers import gpt
from exps.peers.contestant import Rank
from exps.peers.single import BoundRank


def _python(times: int) -> Callable[[], object]:
    def work() -> None:
        total = 0
        for each in range(times):
            total += each

    return work


def _matmul(width: int, times: int) -> Callable[[], object]:
    one, out = torch.randn(width, width), torch.empty(width, width)

    def work() -> None:
        for _ in range(times):
            torch.mm(one, one, out=out)

    return work


def _additions(numbers: int, times: int) -> Callable[[], object]:
    one = torch.randn(numbers)

    def work() -> None:
        for _ in range(times):
            one.add_(1.0)

    return work


def _convolutions(channels: int, side: int) -> Callable[[], object]:
    layer, x = nn.Conv2d(channels, channels, 3, padding=1), torch.randn(2, channels, side, side)

    def work() -> None:
        layer(x).sum().backward()

    return work


def _half(size: str) -> Callable[[], object]:
    return BoundRank(0, gpt.SIZES[size]).run


# each takes some tens of milliseconds
WORKS: dict[str, Callable[[], Callable[[], object]]] = {
    "a loop of Python": lambda: _python(1_000_000),
    "products, 64 wide": lambda: _matmul(64, 2000),
    "products, 1024 wide": lambda: _matmul(1024, 2),
    "additions in a cache": lambda: _additions(1 << 15, 5000),
    "additions in memory": lambda: _additions(1 << 24, 5),
    "convolutions": lambda: _convolutions(16, 96),
    "half of the small model": lambda: _half("small"),
    "half of the medium model": lambda: _half("medium"),
}


class Work(Rank):
    """Does one of `WORKS`."""

    def __init__(self, rank: int, name: str) -> None:
        super().__init__([])
        self._work = WORKS[name]()

    def run(self) -> list[torch.Tensor]:
        self._work()
        return []
