"""The U-Net of the torchgpipe paper: (B, C) are the convolutions of a level and the channels of the first one.

    level 0    C ── keep ─────────────────────────▶ join ── C/2 ──▶ one channel
    level 1      2C ── keep ──────────────────▶ join ── C
    ...              pooled                       enlarged
    level 4            16C ── keep ─────▶ join ── 8C
    bottom                 32C ── 16C

On the way down a level doubles the channels, and a pooling halves the sides. On the way up a picture is enlarged, what was kept
of its level is joined to it, and the level halves the channels: of 2w channels it makes w/2. So the paper's counts of
parameters come out to all printed digits. Each convolution is four layers (convolution, dropout, norm, activation), so
that (5, 64) has 241 layers, as many as the paper's balances add up to.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from exps.seeds.layers import CHANNELS, Layers

LEVELS = 5


class Keep(nn.Identity):
    """A layer whose value a layer of the way up needs again."""


class Join(nn.Module):
    """Joins what was kept to the channels."""

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, kept], dim=1)


class UNet(Layers):
    """``threaded`` hands what was kept from stage to stage, as a model without portals does; otherwise it goes straight to
    the stage that joins it.

    >>> len(UNet(5, 64, device="meta").layers)
    241
    """

    def __init__(
        self,
        blocks: int,
        channels: int,
        *,
        levels: int = LEVELS,
        dropout: float = 0.1,
        threaded: bool = False,
        device: str = "cpu",
    ) -> None:
        with torch.device(device):
            super().__init__(_layers(blocks, channels, levels, dropout))
        self.threaded = threaded

    def forward(self, x: Any) -> Any:
        kept: list[Any] = []
        for _, is_first, layer in self.marked():
            if is_first and self.threaded:
                kept = [each.clone() for each in kept]
            if isinstance(layer, Join):
                x = layer(x, kept.pop())
            else:
                x = layer(x)
            if isinstance(layer, Keep):
                kept.append(x)
        return x


def _layers(blocks: int, channels: int, levels: int, dropout: float) -> list[nn.Module]:
    widths = [channels * 2**level for level in range(levels)]
    found: list[nn.Module] = []
    for before, width in zip([CHANNELS, *widths], widths):
        found += [*_convolutions([before, *[width] * blocks], dropout), Keep(), nn.MaxPool2d(2)]
    deepest = widths[-1]
    found += _convolutions([deepest, *[2 * deepest] * (blocks - 1), deepest], dropout)
    for width in reversed(widths):
        found += [nn.Upsample(scale_factor=2), Join(), *_convolutions([2 * width, *[width // 2] * blocks], dropout)]
    return [*found, nn.Conv2d(channels // 2, 1, kernel_size=1, bias=False)]


def _convolutions(widths: list[int], dropout: float) -> list[nn.Module]:
    """Convolutions from each width to the next."""
    return [
        layer
        for before, after in pairwise(widths)
        for layer in (
            nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False),
            nn.Dropout2d(dropout),
            nn.InstanceNorm2d(after),
            nn.LeakyReLU(),
        )
    ]
