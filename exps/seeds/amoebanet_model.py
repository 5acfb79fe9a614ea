"""AmoebaNet-D of the GPipe and torchgpipe papers: (L, D) are the number of normal cells, and a width.

    stem ── reduction ── reduction ── L/3 normal ── reduction ── L/3 normal ── reduction ── L/3 normal ── classes

A cell takes the outputs of the two cells before it, each brought to its own width first. From these two states its five
sums make five more, each of two operations on earlier states; some of the seven, side by side, are its output. A reduction
halves the sides and doubles the width. In a Pipe the output of a cell goes straight to the two cells that need it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from exps.seeds.layers import CHANNELS, Layers

Operation = tuple[int, str]  # the state that it takes, and what it does


@dataclass(frozen=True)
class Plan:
    """What a kind of cell adds up, and which of its states are its output."""

    sums: tuple[tuple[Operation, Operation], ...]
    output: tuple[int, ...]


# The states of the normal cell's output are those that give the published counts; torchgpipe's authors note that the paper
# on AmoebaNet-D names others.
NORMAL = Plan(
    (
        ((1, "1x1"), (1, "max 3x3")),
        ((1, "same"), (0, "1x7 7x1")),
        ((0, "1x1"), (0, "1x7 7x1")),
        ((2, "max 3x3"), (2, "same")),
        ((1, "average 3x3"), (5, "1x1")),
    ),
    output=(0, 3, 4, 6),
)
REDUCTION = Plan(
    (
        ((0, "max 2x2"), (0, "max 3x3")),
        ((2, "same"), (1, "3x3")),
        ((2, "1x7 7x1"), (2, "max 3x3")),
        ((3, "same"), (1, "max 2x2")),
        ((2, "average 3x3"), (3, "1x1")),
    ),
    output=(4, 5, 6),
)


class AmoebaNet(Layers):
    """
    >>> len(AmoebaNet(18, 256, device="meta").layers)
    24
    """

    def __init__(self, cells: int, width: int, *, classes: int = 1000, device: str = "cpu") -> None:
        with torch.device(device):
            super().__init__(list(_layers(cells, width // 4, classes)))

    def forward(self, x: Any) -> Any:
        before = x
        for _, _, layer in self.marked():
            if isinstance(layer, Cell):
                before, x = x, layer(x, before)
            else:
                before = x = layer(x)
        return x


class Cell(nn.Module):
    """One cell: ``width`` is that of its states."""

    def __init__(
        self, plan: Plan, before: int, last: int, width: int, is_reduction: bool, after_reduction: bool
    ) -> None:
        super().__init__()
        self.plan = plan
        self.bring_last = _convolution(last, width, 1)
        self.bring_before: nn.Module = nn.Identity()
        if after_reduction:
            self.bring_before = Halved(before, width)
        elif before != width:
            self.bring_before = _convolution(before, width, 1)
        self.operations = nn.ModuleList(
            _operation(kind, width, 2 if is_reduction and state < 2 else 1)
            for each in plan.sums
            for state, kind in each
        )

    def forward(self, last: Any, before: Any) -> Any:
        states = [self.bring_last(last), self.bring_before(before)]
        operations = iter(self.operations)
        for (first, _), (second, _) in self.plan.sums:
            states.append(next(operations)(states[first]) + next(operations)(states[second]))
        return torch.cat([states[index] for index in self.plan.output], dim=1)


class Halved(nn.Module):
    """Halves the sides: half of the channels from the pixels with even coordinates, half from those with odd ones."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(before, width // 2, kernel_size=1, stride=2, bias=False)
        self.odd = nn.Conv2d(before, width // 2, kernel_size=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Any) -> Any:
        x = torch.relu(x)
        shifted = nn.functional.pad(x, (-1, 1, -1, 1))
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))


def _layers(cells: int, width: int, classes: int) -> Iterator[nn.Module]:
    yield nn.Sequential(nn.Conv2d(CHANNELS, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width))
    before = last = width
    after_reduction = False
    part = ["normal"] * (cells // 3)
    for kind in ("reduction", "reduction", *part, "reduction", *part, "reduction", *part):
        is_reduction = kind == "reduction"
        plan = REDUCTION if is_reduction else NORMAL
        width *= 2 if is_reduction else 1
        yield Cell(plan, before, last, width, is_reduction, after_reduction)
        before, last, after_reduction = last, width * len(plan.output), is_reduction
    yield nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes))


def _operation(kind: str, width: int, stride: int) -> nn.Module:
    narrow = width // 4
    if kind == "same":
        return nn.Identity()
    if kind == "1x1":
        return _convolution(width, width, 1, stride)
    if kind == "max 2x2":
        return nn.MaxPool2d(2, stride)
    if kind == "max 3x3":
        return nn.MaxPool2d(3, stride, padding=1)
    if kind == "average 3x3":
        return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
    if kind == "3x3":
        middle = [_convolution(narrow, narrow, 3, stride)]
    else:
        middle = [_convolution(narrow, narrow, (1, 7), (1, stride)), _convolution(narrow, narrow, (7, 1), (stride, 1))]
    return nn.Sequential(_convolution(width, narrow, 1), *middle, _convolution(narrow, width, 1))


def _convolution(before: int, after: int, kernel: Any, stride: Any = 1) -> nn.Sequential:
    """Activation, convolution that keeps the sides (or halves them), norm."""
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    padding = tuple(side // 2 for side in sides)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(before, after, kernel, stride, padding, bias=False), nn.BatchNorm2d(after)
    )
