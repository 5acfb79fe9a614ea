"""Models whose layers read more than the layer before them: residuals by attention, several streams, shared keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pippy import pipe_split


class Mix(nn.Module):
    """The average of values, each weighted by how well a learned query fits it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(width) / width)

    def forward(self, values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)
        weights = (F.rms_norm(stacked, stacked.shape[-1:]) * self.query).sum(-1, keepdim=True).softmax(0)
        return (weights * stacked).sum(0)


class AttentionResiduals(nn.Module):
    """Attention Residuals: what a layer gets is an average of what all earlier ones gave, weighted by a query of its own.

    With ``full``, all earlier layers; else all earlier blocks, each the sum of its layers, and the sum of its own block so far.
    Each of the ``blocks`` is a stage. The input counts to the first block.
    """

    def __init__(self, blocks: int, layers: int = 1, width: int = 8, full: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks * layers))
        self.mixes = nn.ModuleList(Mix(width) for _ in self.layers)
        self.of_block, self.full = layers, full

    def forward(self, x: Tensor) -> Tensor:
        done: list[Tensor] = []  # of earlier layers, or blocks
        block: list[Tensor] = []  # the sum of this block so far
        for index, (layer, mix) in enumerate(zip(self.layers, self.mixes)):
            if index and index % self.of_block == 0:
                done, block = done + block, []
                pipe_split()
            given = torch.tanh(layer(mix(done + block) if done or block else x))
            block = [*block, given] if self.full else [block[0] + given] if block else [given]
        return block[-1]
