"""Small models that `torch.export` goes through, and what a pipeline could get wrong in each."""

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

from pippy import pipe_split


class Language(nn.Module):
    """A dict goes in and out; tied weights, a parameter that is read by name, constants, and questions about sizes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.first = self.second = nn.Linear(4, 4)
        self.offset = torch.ones(4)

    def forward(self, batch, *, bonus=True):
        x = self.embedding(batch["ids"])
        if x.shape[1] > 3:
            x = x * 2
        x = self.first(x) * self.scale + torch.arange(x.shape[-1], device=x.device) + self.offset
        pipe_split()
        x = self.second(x) if bonus else x
        first, second = x.chunk(2, -1)
        x = torch.cat([second, first], -1).view(x.shape[0], -1, 4) * self.scale
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten()), "rows": x.shape[0]}


class Normed(nn.Module):
    """Running statistics, of a module and of a function; dropout, likewise; buffers changed in place and assigned."""

    def __init__(self):
        super().__init__()
        self.norm, self.out, self.drop = nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("smooth", torch.zeros(()))

    def forward(self, x):
        x = self.drop(self.norm(x))
        self.calls += 1
        x = x + self.drop(x)
        pipe_split()
        x = F.batch_norm(x, self.mean, self.variance, training=self.training)
        x = F.dropout(x, 0.25, self.training)
        with torch.no_grad():
            self.smooth = self.smooth * 0.5 + x.mean()
        return self.out(x - self.smooth.detach())


class Counted(nn.Module):
    """Inner modules count their calls, one before the mark and one after it."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = Counts(), Counts(), nn.Linear(4, 1)

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.out(self.second(x))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        x = self.linear(x) * self.count.clone()  # autograd keeps it, and it changes
        self.count.copy_(self.count + 1)
        return x + self.count


@dataclasses.dataclass
class Scored:
    """What `Classifier` returns. A class of the user's needs to be known to torch's pytrees."""

    loss: torch.Tensor
    logits: torch.Tensor


torch.export.register_dataclass(Scored)


class Classifier(nn.Module):
    """Layers of torch that hold layers, a recurrent one, an optional argument, and a dataclass as the result."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.memory = nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x, labels, weight=None):
        x, (last, _) = self.memory(self.encoder(x))
        pipe_split()
        if weight is not None:
            last = last * weight[:, None]
        logits = self.out(last[0] + x[:, 0])
        return Scored(loss=F.cross_entropy(logits, labels), logits=logits)
