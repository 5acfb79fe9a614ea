"""Llama in the form in which Meta published it: rotary embeddings as complex numbers, RMSNorm, SwiGLU, a start position."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exps.tried_models.candidate import Candidate, words


@dataclass
class Sizes:
    """Of a model."""

    width: int = 16
    layers: int = 4
    heads: int = 4
    key_heads: int = 2
    words: int = 20
    multiple_of: int = 8
    eps: float = 1e-5
    longest: int = 32


class RMSNorm(nn.Module):
    """Normalizes by the root of the mean of squares."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).type_as(x) * self.weight


def rotations(width: int, longest: int, theta: float = 10000.0) -> Tensor:
    """A complex number of length 1 for each position and each pair of features."""
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(longest, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """``x`` with each pair of features turned by its position."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    shape = [size if index in (1, pairs.ndim - 1) else 1 for index, size in enumerate(pairs.shape)]
    assert turns.shape == (pairs.shape[1], pairs.shape[-1])
    return torch.view_as_real(pairs * turns.view(*shape)).flatten(3).type_as(x)


def repeated(x: Tensor, times: int) -> Tensor:
    """Each head of keys or values for several heads of queries."""
    batch, length, heads, width = x.shape
    if times == 1:
        return x
    return x[:, :, :, None, :].expand(batch, length, heads, times, width).reshape(batch, length, heads * times, width)


class Attention(nn.Module):
    """Queries in more heads than keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = sizes.heads, sizes.key_heads, sizes.width // sizes.heads
        self.wq = nn.Linear(sizes.width, sizes.heads * self.width, bias=False)
        self.wk = nn.Linear(sizes.width, sizes.key_heads * self.width, bias=False)
        self.wv = nn.Linear(sizes.width, sizes.key_heads * self.width, bias=False)
        self.wo = nn.Linear(sizes.heads * self.width, sizes.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.heads, self.width)
        k = self.wk(x).view(batch, length, self.key_heads, self.width)
        v = self.wv(x).view(batch, length, self.key_heads, self.width)
        q, k = rotated(q, turns), rotated(k, turns)
        k, v = repeated(k, self.heads // self.key_heads), repeated(v, self.heads // self.key_heads)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) / self.width**0.5
        if mask is not None:
            scores = scores + mask
        values = torch.matmul(F.softmax(scores, dim=-1).type_as(q), v)
        return self.wo(values.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, multiple_of: int) -> None:
        super().__init__()
        hidden = multiple_of * ((int(2 * 4 * width / 3) + multiple_of - 1) // multiple_of)
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm and added to its input."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes.width, sizes.multiple_of)
        self.attention_norm, self.ffn_norm = RMSNorm(sizes.width, sizes.eps), RMSNorm(sizes.width, sizes.eps)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        hidden = x + self.attention(self.attention_norm(x), turns, mask)
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class MetaLlama(nn.Module):
    """Returns logits."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        sizes = sizes or Sizes()
        self.tok_embeddings = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList()
        for _ in range(sizes.layers):
            self.layers.append(Block(sizes))
        self.norm = RMSNorm(sizes.width, sizes.eps)
        self.output = nn.Linear(sizes.width, sizes.words, bias=False)
        self.turns = rotations(sizes.width // sizes.heads, sizes.longest)  # a plain attribute, and not a buffer

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        _, length = tokens.shape
        hidden = self.tok_embeddings(tokens)
        self.turns = self.turns.to(hidden.device)
        turns = self.turns[start_pos : start_pos + length]
        mask = None
        if length > 1:
            mask = torch.full((length, length), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1).type_as(hidden)
        for layer in self.layers:
            hidden = layer(hidden, turns, mask)
        return self.output(self.norm(hidden)).to(hidden.dtype)


def next_word(logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of each word, given those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def candidates() -> dict[str, Candidate]:
    """The models of this file, by name."""
    return {"Llama as Meta wrote it": Candidate(MetaLlama, lambda: {"tokens": words(), "target": words()}, next_word)}
