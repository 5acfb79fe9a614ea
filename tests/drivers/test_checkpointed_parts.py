"""`torch.utils.checkpoint` in forward, on workers: under schedules with halves of backwards, autocast, torch.compile."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pippy import pipe_split, pipeline
from pippy.drivers.driver.drivers import PipelineDriver, PipelineDriver1F1B

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
WIDTH = 16


def keep_products(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Blocks(nn.Module):
    """Four checkpointed blocks in as many stages; the first makes what all use."""

    def __init__(self, reentrant=False, selective=None):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.block() for _ in range(4)])
        self.options = {"use_reentrant": reentrant}
        if selective is not None:
            self.options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, selective)

    def block(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        shift = self.first(x)
        x = shift.relu()
        for index, block in enumerate(self.blocks):
            if index:
                pipe_split()
            x = x + checkpoint(lambda x, y, block=block: torch.sin(block(x) + y), x, shift, **self.options)
        return x


def plain_step(model, x, target):
    loss = F.mse_loss(model(x), target)
    loss.backward()
    return loss.detach()


def assert_gradients(gradients, plain):
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-13, msg=name)


OPERATORS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]


@pytest.mark.parametrize(
    "options",
    [{"reentrant": True}, {}, {"selective": keep_products}, {"selective": OPERATORS}],
    ids=["reentrant", "not", "policy", "list"],
)
def test_gradients_are_those_of_the_plain_model(threads, options):
    x, target = torch.randn(12, WIDTH), torch.randn(12, WIDTH)
    for schedule in ("1f1b", "zb_h1"):
        model = Blocks(**options)
        plain = copy.deepcopy(model)
        driver = PipelineDriver(pipeline(model, nn.MSELoss()), threads, schedule=schedule)
        for _ in range(2):
            torch.testing.assert_close(driver.run(3, x, target), plain_step(plain, x, target), rtol=1e-12, atol=0)
        assert_gradients(driver.gradients(), plain)
        driver.close()


@pytest.mark.parametrize("reentrant", [True, False])
def test_autocast_around_the_step(threads, reentrant):
    model = Blocks(reentrant).float()
    plain, driver = copy.deepcopy(model), PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
    x, target = torch.randn(2, 8, WIDTH, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(driver.run(1, x, target), plain_step(plain, x, target))
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-2, atol=1e-4, msg=name)
    driver.close()


class Scaled(nn.Module):
    """The loss is linear in the weights, so it is their product with the gradients: if the backward drops what was dropped."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.rand(WIDTH) + 1), nn.Parameter(torch.rand(WIDTH) + 1)
        self.reentrant = reentrant

    def forward(self, x):
        x = checkpoint(self.part, x, self.first, use_reentrant=self.reentrant)
        pipe_split()
        return checkpoint(self.part, x, self.last, use_reentrant=self.reentrant)

    def part(self, x, scale):
        return F.dropout(x * scale)


def mean(output, target):
    return output.mean()


@pytest.mark.parametrize("options", [{}, {"compile": {"backend": "aot_eager"}}], ids=str)
def test_the_backward_drops_the_same_again(threads, options):
    """On one worker: the threads of this process have one random state."""
    for reentrant in (False,) if options else (False, True):
        model, x = Scaled(reentrant), torch.rand(8, WIDTH)
        driver = PipelineDriver(pipeline(model, mean), threads, world_size=1, loss_reduction="mean", **options)
        loss = driver.run(2, x, x)
        for name, gradient in driver.gradients().items():
            torch.testing.assert_close(gradient @ model.get_parameter(name), loss)
        driver.close()
