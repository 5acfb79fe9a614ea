"""Faults that were found by using the runtime as a demanding user would. Each test tells its story."""

import copy

import pytest
import torch
from torch import fx, nn

from pippy import MultiUseParameterConfig, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from tests.comparisons import assert_gradients

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


@fx.wrap
def guarded(x):
    if bool((x > 90).any()):
        raise ValueError("a bad input")
    return x


class Tied(nn.Module):
    """A weight in the first and the last stage, dropout in the middle, and inputs that make it fail."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.layer = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        y = torch.tanh(guarded(x) @ self.weight)
        pipe_split()
        y = torch.tanh(self.dropout(self.layer(y)))
        pipe_split()
        return y @ self.weight


def loss_fn(output, target):
    return ((output - target) ** 2).mean()


class Both:
    """The driver, and the plain model beside it."""

    def __init__(self, cluster):
        self.model = Tied().eval()
        self.plain = copy.deepcopy(self.model)
        self.pipe = pipeline(self.model, loss_fn, multi_use_param_spec=MultiUseParameterConfig.REPLICATE)
        self.driver = PipelineDriver1F1B(self.pipe, cluster, check=False)
        self.x, self.target = torch.randn(7, 8), torch.randn(7, 8)
        self.bad = self.x + 100

    def zero_grad(self):
        self.driver.zero_grad()
        self.plain.zero_grad()

    def run_plain(self):
        loss = loss_fn(self.plain(self.x), self.target)
        loss.backward()
        return loss.detach()

    def run(self):
        torch.testing.assert_close(self.driver.run(2, self.x, self.target), self.run_plain(), rtol=1e-12, atol=0)

    def fail(self):
        with pytest.raises(StepError, match="a bad input"):
            self.driver.run(2, self.bad, self.target)

    def check(self):
        assert_gradients(self.driver, self.plain)


@pytest.fixture
def both(cluster):
    made = Both(cluster)
    yield made
    made.driver.close()


def test_gradients_can_be_read_while_a_run_is_under_way(both):
    """Copies were added up before the run's gradients counted, and never again: those gradients were lost."""
    running = both.driver.run_async(2, both.x, both.target)
    both.run_plain()
    both.check()
    running.result()
    both.check()


def test_an_update_after_a_failed_run_that_nobody_waited_for_raises(both):
    optimizer = both.driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    before = both.driver.state_dict()
    both.driver.run_async(2, both.bad, both.target)
    with pytest.raises(StepError, match="a bad input"):
        optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in both.driver.state_dict().items())
    both.zero_grad()
    both.run()
    both.check()


def test_a_failed_run_does_not_lose_the_gradients_of_the_runs_before_it(both):
    """The run that fails was the one to add up the copies: those of the run before it stayed unadded, and read None."""
    for _ in range(2):  # from here on, two runs make one update
        both.zero_grad()
        both.run()
        both.run()
    both.zero_grad()
    both.run()
    both.fail()
    both.check()
    both.run()
    both.check()


def test_zero_grad_is_not_lost_with_the_run_that_carries_it(both):
    """Workers that were told to give a run up dropped its message whole, and with it the order to drop the gradients."""
    both.run()
    failing = both.driver.run_async(2, both.bad, both.target)
    both.zero_grad()
    given_up = both.driver.run_async(2, both.x, both.target)
    for each in (failing, given_up):
        with pytest.raises(StepError):
            each.result()
    both.check()
    both.run()
    both.check()


def test_a_mode_is_not_lost_with_the_run_that_carries_it(both):
    """As above: workers that gave the run up went on in the mode before it."""
    both.driver.train()
    both.driver.run(2, both.x, both.target)
    failing = both.driver.run_async(2, both.bad, both.target)
    both.driver.eval()
    given_up = both.driver.run_async(2, both.x, both.target)
    for each in (failing, given_up):
        with pytest.raises(StepError):
            each.result()
    both.zero_grad()
    both.run()


def test_one_gradient_can_be_read_after_zero_grad(both):
    """zero_grad() goes to all workers along with the next message; the answers of those not asked were not expected."""
    both.run()
    both.zero_grad()
    assert both.driver.get_grad("layer.bias") is None
    both.zero_grad()
    assert len(both.driver.state_dict()) == 3


class Poisoned(torch.autograd.Function):
    """Passes a value on, and gives back a gradient that is NaN in one place of one input only."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, gradient):
        bias = gradient.sum(0)
        bias[0] = float("nan")
        return gradient, bias


@fx.wrap
def poisoned(x, bias):
    return Poisoned.apply(x, bias)


class PoisonedBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        pipe_split()
        return poisoned(x, self.bias)


def test_clipping_by_a_norm_that_is_no_number_spreads_it_as_torch_does(cluster):
    """One gradient is NaN: torch makes all NaN, so that nobody trains on unaware; the driver left the others alone."""
    model = PoisonedBias()
    plain = copy.deepcopy(model)
    driver = PipelineDriver1F1B(pipeline(model, loss_fn), cluster, check=False)
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    driver.run(2, x, target)
    loss_fn(plain(x), target).backward()
    assert driver.clip_grad_norm_(1.0).isnan()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for name, gradient in driver.gradients().items():
        assert torch.equal(gradient.isnan(), plain.get_parameter(name).grad.isnan()), name
    with pytest.raises(DriverError, match="pass error_if_nonfinite=False to clip anyway"):
        driver.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not driver.clip_grad_norm_(1.0, error_if_nonfinite=False).isfinite()
