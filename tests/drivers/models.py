"""Models for the tests of drivers."""

import torch
from torch import nn
from torch.nn import functional as F

from pippy import pipe_split


class TiedLanguage(nn.Module):
    """An embedding that is the output layer too, a skip over the middle stage, and a layer without parameters."""

    def __init__(self, tokens=13, width=8):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.first = nn.Linear(width, width)
        self.middle = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, width)

    def forward(self, x):
        skip = self.embedding(x)
        y = torch.relu(self.first(skip))
        pipe_split()
        y = torch.tanh(self.middle(y))
        pipe_split()
        y = self.norm(self.last(y) + skip)
        pipe_split()
        return y @ self.embedding.weight.t()


class Chain(nn.Module):
    """Linear layers in stages."""

    def __init__(self, stages=3, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(stages))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index:
                pipe_split()
            x = torch.tanh(layer(x))
        return x


class TwoLayers(nn.Module):
    """The layers of most small models, which say themselves what they do with them."""

    width = 8

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)


def tokens(rows=7):
    """A mini-batch for `TiedLanguage`."""
    return torch.randint(13, (rows, 5)), torch.randint(13, (rows, 5))


def cross_entropy(output, target):
    """The loss of `TiedLanguage`."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
