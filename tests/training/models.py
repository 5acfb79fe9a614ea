"""A model to train, its data, and the same loop in plain PyTorch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pippy
from pippy import PipelineDriver1F1B, pipe_split, pipeline
from tests.drivers.models import Chain


def dataset(rows=22):
    numbers = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(rows, 8, generator=numbers), torch.randn(rows, 8, generator=numbers))


def shuffled(rows=22, **options):
    return DataLoader(dataset(rows), batch_size=4, shuffle=True, **options)


class Parts:
    """A driver of a new model, an optimizer and a scheduler."""

    def __init__(self, cluster, model=lambda: Chain(2), loss=None, **options):
        torch.manual_seed(1)
        self.model = model()
        self.driver = PipelineDriver1F1B(pipeline(self.model, loss or nn.MSELoss()), cluster, **options)
        self.optimizer = self.driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)


class Plain:
    """The same in plain PyTorch, for as many steps as there are groups of items."""

    def __init__(self, model=None, loss=None):
        torch.manual_seed(1)
        self.model, self.loss = model or Chain(2), loss or nn.MSELoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)

    def train(self, groups, max_norm=None):
        losses = []
        for items in groups:
            x, target = (torch.cat(each) for each in zip(*items))
            self.optimizer.zero_grad()
            loss = self.loss(self.model(x), target)
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


def groups_of(loader, accumulate, epochs):
    """The items of each step; the last step of an epoch takes what is left."""
    for _ in range(epochs):
        items = list(loader)
        yield from (items[at : at + accumulate] for at in range(0, len(items), accumulate))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = F.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        pipe_split()
        return F.dropout(self.last(x), 0.1, self.training)


class Augmented(Dataset):
    def __len__(self):
        return 14

    def __getitem__(self, at):
        return torch.rand(8) + at, torch.rand(8)


def parts_of(cluster):
    return Parts(cluster, Noisy)


def run(cluster, folder, steps=8, callbacks=(), num_workers=0, **options):
    """A new script: parts, data and random numbers of its own. Gives the result, the state and what comes next."""
    return trained(parts_of(cluster), folder, callbacks, steps, num_workers, **options)


def trained(parts, folder, callbacks=(), steps=8, num_workers=0, **options):
    """As `run`, with parts that are there."""
    torch.manual_seed(11)
    data = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=num_workers)
    options = {"save_every": 3, "keep": 2, **options} if folder else options
    try:
        result = pippy.train(
            parts.driver, data, parts.optimizer, parts.scheduler, chunks=2, steps=steps, max_norm=1.0, callbacks=callbacks,
            folder=folder, **options
        )  # fmt: skip
        return (
            result,
            parts.driver.state_dict(),
            parts.driver.random_state,
            torch.rand(()),
            parts.scheduler.state_dict(),
        )
    finally:
        parts.driver.close()


def assert_same(one, other):
    assert one[0].losses == other[0].losses and one[0].steps == other[0].steps
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    assert one[2:] == other[2:]
