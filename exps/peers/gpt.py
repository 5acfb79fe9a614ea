"""A GPT-like decoder of three sizes, whole or in parts, and the batch that every contestant trains on.

The model is a plain module: pippy traces and cuts it, torch.distributed.pipelining gets parts of it. A part's parameters
have the names they have in the model, so that gradients are compared by name.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH, CHUNKS = 16, 8


@dataclass(frozen=True)
class Size:
    """How large a model is: layers, width, heads, length of a sequence, vocabulary.

    >>> SIZES["tiny"]
    Size(layers=4, width=16, heads=2, length=8, vocabulary=32)
    """

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int


SIZES = {
    "medium": Size(8, 512, 8, 64, 2048),
    "small": Size(8, 64, 4, 32, 256),
    "tiny": Size(4, 16, 2, 8, 32),
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """The whole model, or those parts of it that ``stage`` of ``stages`` holds.

    With ``again``, torch.utils.checkpoint stands around each block.

    >>> [name for name, _ in Gpt(SIZES["tiny"], 3, 4).named_children()], list(Gpt(SIZES["tiny"], 3, 4).blocks)
    (['blocks', 'norm', 'head'], ['3'])
    """

    def __init__(self, size: Size, stage: int = 0, stages: int = 1, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first:
            self.embed = nn.Embedding(size.vocabulary, size.width)
            self.position = nn.Parameter(torch.randn(size.length, size.width))
        places = range(*(part * size.layers // stages for part in (stage, stage + 1)))
        # a dict: the blocks of a part keep their numbers
        self.blocks = nn.ModuleDict({str(place): Block(size) for place in places})
        if self.last:
            self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.embed(x) + self.position
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x)) if self.last else x


def model(size: Size) -> Gpt:
    """The whole model, with the same parameters in every process."""
    torch.manual_seed(0)
    return Gpt(size)


def part(size: Size, stage: int, stages: int, again: bool = False) -> Gpt:
    """What ``stage`` holds of `model`, with the same parameters.

    >>> whole, end = model(SIZES["tiny"]), part(SIZES["tiny"], 1, 2)
    >>> bool((whole.head.weight == end.head.weight).all())
    True
    """
    piece, state = Gpt(size, stage, stages, again), model(size).state_dict()
    piece.load_state_dict({name: state[name] for name in piece.state_dict()})
    return piece


def cuts(size: Size, stages: int) -> list[str]:
    """The modules that begin a stage.

    >>> cuts(SIZES["small"], 4)
    ['blocks.2', 'blocks.4', 'blocks.6']
    """
    return [f"blocks.{stage * size.layers // stages}" for stage in range(1, stages)]


def batch(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the tokens to be told from them, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randint(size.vocabulary, (2, BATCH, size.length), generator=generator)
    return x, target


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens: micro-batches of one size count alike."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def accumulated(model: nn.Module, chunks: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """The losses of a step in one process: micro-batch after micro-batch, whose gradients add up."""
    losses = []
    for x, target in chunks:
        loss = loss_fn(model(x), target)
        (loss / CHUNKS).backward()
        losses.append(loss.detach())
    return losses
