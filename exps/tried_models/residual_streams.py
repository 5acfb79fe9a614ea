"""Models whose layers read more than the layer before them: what an early stage makes is read by many later ones.

Each is a row of parts, and ``begins`` says which begin a stage. Most are half a layer, so cuts are between layers and inside.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exps.tried_models.candidate import Candidate, numbers, words
from pippy import pipe_split


class Parts(nn.Module):
    """A model whose parts begin a stage where it is told so."""

    def __init__(self, begins: Collection[int]) -> None:
        super().__init__()
        self.begins = frozenset(begins)

    def part(self, number: int) -> None:
        """Say that this part begins."""
        if number in self.begins:
            pipe_split()


class Mix(nn.Module):
    """The average of values, each weighted by how well a learned query fits it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(width) / width)

    def forward(self, values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)
        weights = (F.rms_norm(stacked, stacked.shape[-1:]) * self.query).sum(-1, keepdim=True).softmax(0)
        return (weights * stacked).sum(0)


class AttentionResiduals(Parts):
    """Attention Residuals: what a layer gets is an average of what all earlier ones gave, weighted by a query of its own.

    With ``full``, all earlier layers; else all earlier blocks, each the sum of its layers, and the sum of its own block so far.
    If ``begins`` is left out, each of the ``blocks`` is a stage. The input counts to the first block.
    """

    def __init__(
        self, blocks: int, layers: int = 1, width: int = 8, full: bool = False, begins: Collection[int] | None = None
    ) -> None:
        super().__init__(range(2 * layers, 2 * layers * blocks, 2 * layers) if begins is None else begins)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks * layers))
        self.mixes = nn.ModuleList(Mix(width) for _ in self.layers)
        self.of_block, self.full = layers, full

    def forward(self, x: Tensor) -> Tensor:
        done: list[Tensor] = []  # of earlier layers, or blocks
        block: list[Tensor] = []  # the sum of this block so far
        for index, (layer, mix) in enumerate(zip(self.layers, self.mixes)):
            if index % self.of_block == 0:
                done, block = done + block, []
            self.part(2 * index)
            given = mix(done + block) if done or block else x
            self.part(2 * index + 1)
            given = torch.tanh(layer(given))
            block = [*block, given] if self.full else [block[0] + given] if block else [given]
        return block[-1]


class HyperConnections(Parts):
    """Several streams beside each other: a layer reads an average of them, and they are mixed when its result is added."""

    def __init__(self, layers: int, begins: Collection[int], streams: int = 3, width: int = 8) -> None:
        super().__init__(begins)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.reads = nn.ParameterList(torch.rand(streams) for _ in self.layers)
        self.mixes = nn.ParameterList(torch.rand(streams, streams) / streams for _ in self.layers)
        self.writes = nn.ParameterList(torch.rand(streams) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        streams = [x] * len(self.reads[0])
        for index, layer in enumerate(self.layers):
            self.part(2 * index)
            read = sum(self.reads[index][at] * each for at, each in enumerate(streams))
            self.part(2 * index + 1)
            given = torch.tanh(layer(F.rms_norm(read, read.shape[-1:])))
            streams = [
                sum(self.mixes[index][at, other] * each for other, each in enumerate(streams))
                + self.writes[index][at] * given
                for at in range(len(streams))
            ]
        return torch.stack(streams).sum(0)


class Attention(nn.Module):
    """One head. Its keys and values are given, or made here of ``x``."""

    def __init__(self, width: int, own: bool = True) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, width) if own else nn.Identity() for _ in range(2))

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Those that later layers may read, too."""
        return self.key(x), self.value(x)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, causal: bool = True) -> Tensor:
        return x + self.out(F.scaled_dot_product_attention(self.query(x), keys, values, is_causal=causal))


class SharedKeysAndValues(Parts):
    """A decoder in which one layer of three makes keys and values: those behind it read them."""

    def __init__(self, layers: int, begins: Collection[int], width: int = 8) -> None:
        super().__init__(begins)
        self.attention = nn.ModuleList(Attention(width, own=index % 3 == 0) for index in range(layers))
        self.mlp = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = zip(self.attention, self.mlp)
        for index, (attention, mlp) in enumerate(layers):
            self.part(2 * index)
            if index % 3 == 0:
                keys, values = attention.keys_and_values(x)
            x = attention(x, keys, values)
            self.part(2 * index + 1)
            x = x + torch.tanh(mlp(x))
        return x


class EveryLayerReads(Parts):
    """An encoder, and a decoder whose layers each read what the encoder gave."""

    def __init__(self, layers: int, begins: Collection[int], width: int = 8) -> None:
        super().__init__(begins)
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.attention = nn.ModuleList(Attention(width) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.tanh(self.encoder[1](torch.tanh(self.encoder[0](x))))
        layers: Any = zip(self.attention, self.mlp)
        for index, (attention, mlp) in enumerate(layers):
            self.part(2 * index)
            x = attention(x, *attention.keys_and_values(memory), causal=False)
            self.part(2 * index + 1)
            x = x + torch.tanh(mlp(x))
        return x


class LongSkips(Parts):
    """A U-Net: each layer on the way up reads what the layer of that height gave on the way down."""

    def __init__(self, heights: int, begins: Collection[int], width: int = 8) -> None:
        super().__init__(begins)
        self.down = nn.ModuleList(nn.Conv1d(3, 3, 3, padding=1) for _ in range(heights))
        self.up = nn.ModuleList(nn.Conv1d(6, 3, 3, padding=1) for _ in range(heights))
        self.inside = nn.Linear(width // 2**heights, width // 2**heights)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for index, down in enumerate(self.down):
            self.part(index)
            skips.append(torch.tanh(down(x)))
            x = F.avg_pool1d(skips[-1], 2)
        x = self.inside(x)
        for index, up in enumerate(self.up, len(self.down)):
            self.part(2 * index - len(self.down))
            x = F.interpolate(x, scale_factor=2)
            self.part(2 * index - len(self.down) + 1)
            x = torch.tanh(up(torch.cat([skips.pop(), x], dim=1)))
        return x


class MultiTokenPrediction(Parts):
    """A language model that predicts several next tokens: each depth reads the one before it and the embedding, by one head.

    Returns its loss: of the next token, and with a smaller weight that of each depth.
    """

    def __init__(self, layers: int, begins: Collection[int], width: int = 8, tokens: int = 11, depths: int = 2) -> None:
        super().__init__(begins)
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.joins = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depths))
        self.head = nn.Linear(width, tokens)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = x = self.embedding(ids)
        for index, layer in enumerate(self.layers):
            self.part(index)
            x = x + torch.tanh(layer(F.rms_norm(x, x.shape[-1:])))
        loss = self.loss(x, ids, 1)
        for depth, join in enumerate(self.joins, 1):
            self.part(len(self.layers) + depth - 1)
            x = torch.tanh(join(torch.cat([x[:, :-1], embedded[:, depth:]], dim=-1)))
            loss = loss + 0.3**depth * self.loss(x, ids, depth + 1)
        return loss

    def loss(self, x: Tensor, ids: Tensor, ahead: int) -> Tensor:
        """Of the tokens that are so far ahead."""
        logits = self.head(x)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, ahead:].flatten())


class TwoTowers(Parts):
    """Two towers, one for each half of the input. Their loss compares all rows of the mini-batch."""

    def __init__(self, layers: int, begins: Collection[int], width: int = 8) -> None:
        super().__init__(begins)
        self.left, self.right = (nn.ModuleList(nn.Linear(width, width) for _ in range(layers)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = x.chunk(2, dim=1)
        for index, layer in enumerate([*self.left, *self.right]):
            self.part(index)
            if index < len(self.left):
                left = torch.tanh(layer(left))
            else:
                right = torch.tanh(layer(right))
        return left, right


def contrast(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The loss of two towers: ``target`` says which row of one belongs to each row of the other."""
    left, right = (F.normalize(each, dim=-1) for each in output)
    return F.cross_entropy(5 * left @ right.t(), target)


def candidates() -> dict[str, Candidate]:
    """The models, with nothing cut yet."""

    def of(make: Callable[[], nn.Module]) -> Candidate:
        return Candidate(make, lambda: {"x": numbers(4, 3, 8), "target": numbers(4, 3, 8)}, F.mse_loss)

    return {
        "Attention Residuals, full": of(lambda: AttentionResiduals(4, full=True, begins=())),
        "Attention Residuals, blocks": of(lambda: AttentionResiduals(4, 2, begins=())),
        "hyper-connections": of(lambda: HyperConnections(4, ())),
        "keys and values of other layers": of(lambda: SharedKeysAndValues(6, ())),
        "decoder layers that read the encoder": of(lambda: EveryLayerReads(4, ())),
        "U-Net with long skips": of(lambda: LongSkips(3, ())),
        "multi-token prediction": Candidate(
            lambda: MultiTokenPrediction(4, ()), lambda: {"ids": words(4, 8, 11)}, returns_only_a_loss=True
        ),
    }
