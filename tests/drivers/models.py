"""Models for the tests of drivers, and a training whose numbers depend on seeds alone: on no process, and on no cut."""

from hashlib import blake2b

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pippy import IndexLoader, PipelineDriver1F1B, pipe_split, pipeline


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


def keyed_rows():
    numbers = torch.Generator().manual_seed(1)
    return TensorDataset(*torch.randn(2, 24, 8, generator=numbers, dtype=torch.float64))


def numbers_of_training(cluster, stages=2, **options):
    """Parameters that workers make, dropout, and rows that workers load: two epochs. The text says the numbers to the bit."""
    with torch.device("meta"):
        layers = [
            nn.Linear(8, 8),
            nn.Dropout(0.3),
            nn.Linear(8, 8),
            nn.Dropout(0.3),
            nn.Linear(8, 8),
        ]
        model = nn.Sequential(*layers).double()
    driver = PipelineDriver1F1B(
        pipeline(model, nn.MSELoss(), split="parameters", num_stages=stages), cluster, keyed_random=7, **options
    )
    driver.initialize(seed=3)
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2)
    loader = IndexLoader(f"{__name__}:keyed_rows", 8, columns=2, sampler=[*range(0, 24, 2), *range(1, 24, 2)], seed=5)
    for batch in [*loader, *loader]:
        driver.run(4, *batch)
        optimizer.step()
        optimizer.zero_grad()
    state = driver.state_dict()
    driver.close()
    found = blake2b(b"".join(tensor.numpy().tobytes() for tensor in state.values()), digest_size=8)
    return f"trained to {found.hexdigest()}"
