"""Models of sequences, written as their users write them."""

from typing import Any

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


class SelfAttention(nn.Module):
    """Causal, by torch's fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in self.qkv(x).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class SmallGpt(nn.Module):
    """Asserts lengths, and returns logits and a loss if there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {
                "words": nn.Embedding(WORDS, WIDTH),
                "places": nn.Embedding(16, WIDTH),
                "attention": nn.ModuleList(SelfAttention() for _ in range(3)),
                "norms": nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3)),
                "mlps": nn.ModuleList(
                    nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
                    for _ in range(3)
                ),
            }
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks["words"].weight = self.head.weight

    def forward(self, index: Tensor, targets: Tensor | None = None) -> dict[str, Tensor | None]:
        _, length = index.size()
        assert length <= 16, f"a sequence of {length} words, and there are 16 places"
        blocks: Any = self.blocks
        x = blocks["words"](index) + blocks["places"](torch.arange(length, device=index.device))
        for attention, norm, mlp in zip(blocks["attention"], blocks["norms"], blocks["mlps"], strict=True):
            x = x + attention(norm(x))
            x = x + mlp(x)
        if targets is None:
            return {"logits": self.head(x[:, [-1], :]), "loss": None}
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return {"logits": logits, "loss": loss}


class Experts(nn.Module):
    """Each word goes to the two experts that a gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = torch.topk(self.gate(flat), 2)
        weights = F.softmax(weights, dim=1)
        results = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == index)
            results[rows] += weights[rows, nth, None] * expert(flat[rows])
        return results.view_as(x)


class MixtureOfExperts(nn.Module):
    """Layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())


class Translator(nn.Module):
    """nn.Transformer, with a causal mask of the target's length."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), dtype=self.head.weight.dtype)
        hidden = self.transformer(self.source(src), self.target(tgt), tgt_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tgt.flatten())


class AttendingDecoder(nn.Module):
    """A GRU that looks back at what another has read, a word at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.writer, self.score = nn.GRUCell(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        read, last = self.reader(self.words(src))
        state, losses = last.squeeze(0), []
        for word in tgt.unbind(1):
            weights = torch.bmm(self.score(read), state.unsqueeze(2)).softmax(1)
            found = (weights * read).sum(1)
            losses.append(F.cross_entropy(self.head(torch.cat([state, found], 1)), word))
            state = self.writer(torch.cat([self.words(word), found], 1), state)
        return torch.stack(losses).mean()


class Temporal(nn.Module):
    """Causal convolutions with weight norm, whose ends are cut off."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(norm(nn.Conv1d(WIDTH, WIDTH, 2, padding=2**i, dilation=2**i)) for i in range(4))
        self.head = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for index, conv in enumerate(self.convs):
            x = x + F.dropout(torch.relu(conv(x)[:, :, : -(2**index)]), 0.1, self.training)
        return self.head(x).pow(2).mean()


class WaveNet(nn.Module):
    """Gated convolutions, whose skips are added up at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1) for _ in range(4))
        self.skips = nn.ModuleList(nn.Conv1d(WIDTH, 4, 1) for _ in range(4))
        self.head = nn.Conv1d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for gated, skip in zip(self.gated, self.skips, strict=True):
            x = x + F.glu(gated(x), dim=1)
            total = total + skip(x)
        assert isinstance(total, Tensor)
        return self.head(torch.relu(total)).pow(2).mean()


class SelectiveScan(nn.Module):
    """A state space whose steps depend on the input, as in Mamba, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH + 8) for _ in range(3))
        self.decay = nn.ParameterList(torch.rand(WIDTH, 4) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer, decay in zip(self.layers, self.decay, strict=True):
            step, enters, leaves = layer(x).split([WIDTH, 4, 4], dim=-1)
            step = F.softplus(step)
            state, outputs = x.new_zeros(x.shape[0], WIDTH, 4), []
            for t in range(x.shape[1]):
                kept = torch.exp(-step[:, t, :, None] * decay.exp())
                state = kept * state + (step[:, t] * x[:, t])[:, :, None] * enters[:, t, None, :]
                outputs.append((state * leaves[:, t, None, :]).sum(-1))
            x = x + torch.stack(outputs, dim=1)
        return self.head(x).pow(2).mean()


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
        "GPT that returns logits and loss": Candidate(SmallGpt, lambda: {"index": words(), "targets": words()}),
        "mixture of experts": Candidate(MixtureOfExperts, lambda: {"x": words()}, returns_only_a_loss=True),
        "nn.Transformer, causal": Candidate(
            Translator, lambda: {"src": words(), "tgt": words(length=5)}, returns_only_a_loss=True
        ),
        "GRU with attention": Candidate(
            AttendingDecoder, lambda: {"src": words(), "tgt": words(length=4)}, returns_only_a_loss=True
        ),
        "temporal convolutions, weight norm": Candidate(
            Temporal, lambda: {"x": numbers(4, WIDTH, 10)}, returns_only_a_loss=True
        ),
        "WaveNet": Candidate(WaveNet, lambda: {"x": numbers(4, WIDTH, 10)}, returns_only_a_loss=True),
        "selective scan": Candidate(SelectiveScan, lambda: {"x": numbers(4, 5, WIDTH)}, returns_only_a_loss=True),
        "einops": Candidate(EinopsAttention, lambda: {"x": numbers(4, 6, WIDTH)}, returns_only_a_loss=True),
        "shape checks": Candidate(CheckedShapes, lambda: {"x": numbers(4, 6, WIDTH)}),
        "shape checks, mask": Candidate(
            CheckedShapes, lambda: {"x": numbers(4, 6, WIDTH), "mask": (numbers(4, 6) > 0).double()}
        ),
    }
