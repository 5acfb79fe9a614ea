"""Models to look at."""

import dataclasses

import torch
from torch import nn

from pippy import Pipe, pipe_split, pipeline
from tests.ir.linear import OneLinear
from tests.zoo import ExampleCode


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x):
        x = self.norm(self.first(x))
        pipe_split()
        return self.last(self.drop(x.mean(dim=(2, 3)))), x.shape[-1]


class Language(nn.Module):
    """Integers, a leaf module with several outputs, and attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.attend = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.encode, self.lstm = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LSTM(8, 8)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        pipe_split()
        y, weights = self.attend(x, x, x)
        pipe_split()
        return {"y": self.encode(y), "lstm": self.lstm(x), "weights": weights, "same": tokens}


@dataclasses.dataclass
class Pair:
    one: torch.Tensor
    count: int


class Structured(OneLinear):
    def forward(self, x, extra):
        pair = Pair(self.lin(x), x.size(0))
        top = torch.topk(x, 2)
        pipe_split()
        return pair.one.double() * pair.count + extra["b"], top


class Guessing(nn.Module):
    """Needs real numbers in its first stage for one of two values."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        scale = x.sum().item()
        pipe_split()
        places = torch.nonzero(x)
        x = self.b(x)
        pipe_split()
        return torch.full_like(x, scale) + x, x * scale, x, places


class Named(nn.Module):
    """A module whose name means something to every language that a drawing is written in."""

    NAME = "a<b>&c'`;#"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({self.NAME: nn.Linear(4, 4)})

    def forward(self, x):
        x = self.layers[self.NAME](x)
        pipe_split()
        return self.layers[self.NAME](x)


class Skipping(nn.Module):
    """Many stages with inputs, skips, a travelling parameter and a shared layer between them."""

    def __init__(self, stages):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(16, 16))
        self.layers, self.shared = nn.ModuleList(nn.Linear(16, 16) for _ in range(stages)), nn.Linear(16, 16)

    def forward(self, x, mask, an_input_with_a_very_long_name_indeed):
        x, skips = x @ self.embed, []
        for index, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            skips.append(x)
            if index % 3 == 2:
                x = x * mask + skips[-3]
            if index in (1, len(self.layers) - 1):
                x = self.shared(x)
            if index < len(self.layers) - 1:
                pipe_split()
        return x @ self.embed, mask, skips[0], an_input_with_a_very_long_name_indeed


def example(training=True):
    return pipeline(ExampleCode(), nn.MSELoss() if training else None)


X, WIDE = torch.randn(4, 8), torch.randn(4, 16)
# Pipes of all sorts, each with the arguments of a call.
DRAWN = {
    "example": lambda: (example(), (X, X)),
    "forward": lambda: (example(training=False), (X,)),
    "sequential": lambda: (Pipe.from_sequential(nn.Sequential(nn.Linear(8, 4), nn.ReLU())), (X,)),
    "unknown": lambda: (pipeline(Guessing()), (torch.randn(3, 4),)),
    "named": lambda: (pipeline(Named()), (torch.randn(3, 4),)),
    "language": lambda: (pipeline(Language()), (torch.zeros(2, 5, dtype=torch.int64),)),
    "four": lambda: (pipeline(Skipping(4)), (WIDE, WIDE, WIDE)),
    "twelve": lambda: (pipeline(Skipping(12), lambda output, target: output[0].sum()), (WIDE, WIDE, WIDE, WIDE)),
}
