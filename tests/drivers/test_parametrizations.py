"""Modules whose classes torch makes while the program runs: weight norm, spectral norm, and others of that kind."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from pippy import PipelineDriver, pipe_split, pipeline

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def symmetric(module):
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def old(function):
    def apply(module):
        with pytest.warns(FutureWarning):
            return function(module)

    return apply


NORMS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "of the user": symmetric,
    "old weight_norm": old(nn.utils.weight_norm),
    "old spectral_norm": nn.utils.spectral_norm,
}


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.second, self.last = norm(nn.Linear(4, 4)), norm(nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        pipe_split()
        x = torch.tanh(self.second(x))
        pipe_split()
        return self.last(x)


def loss_fn(output, target):
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("on, schedule", [("threads", "1f1b"), ("threads", "zb_h1"), ("cluster", "1f1b")])
def test_parametrized_modules_travel(norm, on, schedule, request):
    torch.manual_seed(3)
    model = Normed(norm)
    torch.manual_seed(3)
    plain = Normed(norm)
    names = list(plain.state_dict())
    x, target = torch.randn(4, 4), torch.randn(4, 4)
    driver = PipelineDriver(pipeline(model, loss_fn), request.getfixturevalue(on), schedule=schedule)
    optimizers = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss = loss_fn(plain(x), target)
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        torch.testing.assert_close(driver.run(1, x, target), loss.detach())
        for name, gradient in driver.gradients().items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
        for each in optimizers:
            each.step()
    state = driver.state_dict()
    assert list(state) == names
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor)
    driver.close()
