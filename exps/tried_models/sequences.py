"""Models of sequences, written as their users write them."""

import einops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exps.tried_models.candidate import Candidate, numbers, words

WIDTH, WORDS = 8, 20


class Encoder(nn.Module):
    """torch's own transformer encoder, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        hidden = self.encoder(self.embedding(x), src_key_padding_mask=padding)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())


class PackedLstm(nn.Module):
    """An LSTM that skips the padding behind each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.mix, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(x), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states, (last, _) = self.lstm(packed)
        states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
        logits = self.head(torch.tanh(self.mix(states)) + last[-1][:, None])
        return F.cross_entropy(logits.flatten(0, 1), x.flatten())


class LstmCells(nn.Module):
    """A loop over the steps of a sequence, two cells deep."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lower, self.upper = nn.LSTMCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(x.shape[0], WIDTH, dtype=self.head.weight.dtype, device=x.device)
        lower, upper, outputs = (zeros, zeros), (zeros, zeros), []
        for step in range(x.shape[1]):
            lower = self.lower(self.embedding(x[:, step]), lower)
            upper = self.upper(lower[0], upper)
            outputs.append(upper[0])
        return F.cross_entropy(self.head(torch.stack(outputs, 1)).flatten(0, 1), x.flatten())


class EinopsAttention(nn.Module):
    """Attention whose shapes are said in words."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = einops.rearrange(qkv(x), "b s (t h d) -> t b h s d", t=3, h=2)
            weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * k.shape[-1] ** -0.5, -1)
            x = x + out(einops.rearrange(weights @ v, "b h s d -> b s (h d)"))
        return einops.reduce(x**2, "b s d -> ", "mean")


class CheckedShapes(nn.Module):
    """A model that asks what it was given before it computes, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: object) -> dict[str, object]:
        if x.dim() != 3:
            raise ValueError(f"(batch, length, {WIDTH}) is wanted, not {tuple(x.shape)}")
        if options:
            raise TypeError(f"unknown options: {sorted(options)}")
        batch, length, width = x.shape
        assert width == WIDTH and x.is_floating_point()
        if length > 64:
            x = x[:, :64]
        if mask is not None:
            if mask.shape != (batch, length):
                raise ValueError("the mask has another shape")
            x = x * mask.unsqueeze(-1)
        for index, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) + (x if index % 2 else 0)
        return {"loss": self.head(x).pow(2).mean(), "hidden": x}


def candidates() -> dict[str, Candidate]:
    """The models of this file, by name."""
    padding = torch.zeros(4, 8, dtype=torch.bool)
    padding[0, 5:] = True
    lengths = torch.tensor([8, 3, 2, 5])
    return {
        "nn.TransformerEncoder": Candidate(Encoder, lambda: {"x": words()}, returns_only_a_loss=True),
        "nn.TransformerEncoder, padding mask": Candidate(
            Encoder, lambda: {"x": words(), "padding": padding}, returns_only_a_loss=True
        ),
        "LSTM over packed sequences": Candidate(
            PackedLstm, lambda: {"x": words(), "lengths": lengths}, returns_only_a_loss=True
        ),
        "loop of LSTM cells": Candidate(LstmCells, lambda: {"x": words(length=5)}, returns_only_a_loss=True),
        "einops": Candidate(EinopsAttention, lambda: {"x": numbers(4, 6, WIDTH)}, returns_only_a_loss=True),
        "shape checks": Candidate(CheckedShapes, lambda: {"x": numbers(4, 6, WIDTH)}),
        "shape checks, mask": Candidate(
            CheckedShapes, lambda: {"x": numbers(4, 6, WIDTH), "mask": (numbers(4, 6) > 0).double()}
        ),
    }
