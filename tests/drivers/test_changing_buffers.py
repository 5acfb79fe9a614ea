"""Buffers that a layer changes at each call, while several micro-batches are on their way."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import PipeTracer, pipe_split, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.driver.drivers import PipelineDriver

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Leaf(nn.Module):
    """Counts in a buffer, and hands it out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(4))
        self.also = torch.ones(4)

    def forward(self, x):
        self.seen.add_(x.detach().mean(0))
        self.also += 1
        return self.give(x)

    def give(self, x):
        return self.seen, [self.also[:]]


class Uses(Leaf):
    """Keeps the buffer for the backward."""

    def give(self, x):
        return x * self.seen, [0]


class UsesACopy(Leaf):
    def give(self, x):
        return x * self.seen.clone(), [0]


class KeepsLeaf(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Leaf) or super().is_leaf_module(m, module_qualified_name)


class Counting(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.leaf, self.b = nn.Linear(4, 4), kind(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        seen, also = self.leaf(x)
        pipe_split()
        return self.b(x * seen * also[0])


class Traced(Counting):
    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x):
        x = self.a(x)
        self.count += 1
        x = x * self.count
        pipe_split()
        return self.b(x)


class TracedWithACopy(Traced):
    def forward(self, x):
        x = self.a(x)
        self.count += 1
        x = x * self.count.clone()
        pipe_split()
        return self.b(x)


def driver_of(model, threads):
    pipe = pipeline(model, nn.MSELoss(), tracer=KeepsLeaf)
    return PipelineDriver(pipe, threads, schedule="looped_bfs", stages_per_worker=2, world_size=1, check=False)


def train(plain, x, target):
    """Give a plain model the micro-batches one after the other. It has their gradients then; this gives their loss."""
    total = 0.0
    for mine, its in zip(x.chunk(4), target.chunk(4)):
        part = F.mse_loss(plain(mine), its) / 4
        part.backward()
        total += part.item()
    return total


def test_a_buffer_that_a_leaf_hands_out_is_as_it_was_then(threads):
    """Two stages on one worker shared its memory: the second saw what the first had counted of later micro-batches."""
    model, x, target = Counting(Leaf), torch.randn(8, 4), torch.randn(8, 4)
    plain = copy.deepcopy(model)
    driver = driver_of(model, threads)
    assert driver.run(4, x, target).item() == pytest.approx(train(plain, x, target), rel=1e-12)
    torch.testing.assert_close(driver.get_grad("a.weight"), plain.a.weight.grad)


ADVISED = [
    (lambda: Counting(Uses), r"'leaf.seen' \(of Uses\)", lambda: Counting(UsesACopy)),
    (lambda: Traced(Leaf), "'count'", lambda: TracedWithACopy(Leaf)),
]


@pytest.mark.parametrize(("model", "name", "advised"), ADVISED)
def test_a_buffer_that_the_backward_needs_is_named_and_the_advice_works(model, name, advised, threads):
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    with pytest.raises(StepError, match=rf"{name}.*later micro-batch(.|\n)*\.clone\(\)"):
        driver_of(model(), threads).run(4, x, target)
    assert driver_of(model(), threads).run(1, x, target).isfinite()
    made = advised()
    plain, driver = copy.deepcopy(made), driver_of(made, threads)
    assert driver.run(4, x, target).item() == pytest.approx(train(plain, x, target), rel=1e-12)
    torch.testing.assert_close(driver.get_grad("a.weight"), plain.a.weight.grad)
