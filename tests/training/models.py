"""A model to train, its data, and the same loop in plain PyTorch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pippy import PipelineDriver1F1B, pipeline
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
