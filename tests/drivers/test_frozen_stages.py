"""Stages that train nothing: where no gradient is needed none is computed or sent."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import MultiUseParameterConfig, PipelineDriver, PipelineDriver1F1B, pipe_split, pipeline
from tests.drivers.models import TiedLanguage

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Adapted(nn.Module):
    """A frozen layer beside two small ones that are trained, as LoRA has it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


KINDS = {
    "t": lambda: nn.Linear(4, 4),
    "f": lambda: nn.Linear(4, 4).requires_grad_(False),
    "L": Adapted,
    "n": nn.Tanh,
}


class Stages(nn.Module):
    """A stage for each letter: trained, frozen, with adapters, or with no parameters. The last uses what the first makes."""

    def __init__(self, kinds):
        super().__init__()
        self.layers = nn.ModuleList(KINDS[kind]() for kind in kinds)

    def forward(self, x):
        first = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:-1]:
            pipe_split()
            x = torch.tanh(layer(x))
        pipe_split()
        return self.layers[-1](x + first)


def sent(cluster):
    """How many bytes the workers have sent to each other."""
    transports = [worker.context.transport for worker in cluster.engine.workers]
    return sum(to.bytes for each in transports for to in each.sent.values())


def check_steps(driver, plain, steps=2):
    """Steps of an optimizer of the trained parameters are those of the plain model."""
    x, target = torch.randn(7, 4), torch.randn(7, 4)
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1, param_groups=[{"params": trained}])
    plain_optimizer = torch.optim.AdamW([plain.get_parameter(name) for name in trained], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        loss = F.mse_loss(plain(x), target)
        loss.backward()
        torch.testing.assert_close(driver.run(3, x, target), loss.detach())
        for name, gradient in driver.gradients().items():
            expected = plain.get_parameter(name).grad
            assert gradient is expected is None or torch.allclose(gradient, expected)
        torch.testing.assert_close(
            driver.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1), check_stride=False
        )
        optimizer.step()
        plain_optimizer.step()
    torch.testing.assert_close(driver.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("kinds", "gradients"), [("tttt", 4), ("fttt", 2), ("fnLf", 1), ("ffft", 0), ("tfft", 4), ("LfnL", 4), ("nfLL", 1)]
)
def test_no_gradient_is_sent_where_none_is_needed(threads, kinds, gradients):
    model = Stages(kinds)
    plain = copy.deepcopy(model)
    pipe = pipeline(model, nn.MSELoss())
    for schedule in ("1f1b", "zb_h1", "fill_drain"):
        driver = PipelineDriver(pipe, threads, schedule=schedule, out_of_order=schedule == "zb_h1")
        check_steps(driver, copy.deepcopy(plain))
        before = sent(threads)
        driver.run(3, torch.randn(7, 4), torch.randn(7, 4))
        assert sent(threads) - before == (4 + gradients) * 7 * 4 * 8, "a message without a gradient has no bytes"
        driver.close()


def test_a_stage_that_freezes_and_thaws(threads):
    model = Stages("tttt")
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads, check=False)
    x, target = torch.randn(7, 4), torch.randn(7, 4)
    for frozen, gradients in (((), 4), ((0,), 2), ((0, 1), 1), ((0,), 2), ((), 4)):
        for number, layer in enumerate(model.layers):
            layer.requires_grad_(number not in frozen)
        plain = copy.deepcopy(model)
        F.mse_loss(plain(x), target).backward()
        driver.zero_grad()
        before = sent(threads)
        driver.run(3, x, target)
        assert sent(threads) - before == (4 + gradients) * 7 * 4 * 8
        for name, gradient in driver.gradients().items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


@pytest.mark.parametrize("config", MultiUseParameterConfig)
def test_a_frozen_parameter_that_several_stages_use(threads, config):
    model = TiedLanguage()
    model.embedding.requires_grad_(False)
    model.first.requires_grad_(False)
    plain = copy.deepcopy(model)
    pipe = pipeline(model, cross_entropy, multi_use_param_spec=config)
    driver = PipelineDriver1F1B(pipe, threads, check=False)
    x, target = torch.randint(13, (6, 5)), torch.randint(13, (6, 5))
    loss = cross_entropy(plain(x), target)
    loss.backward()
    torch.testing.assert_close(driver.run(3, x, target), loss.detach())
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def cross_entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
