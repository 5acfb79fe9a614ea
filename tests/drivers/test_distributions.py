"""Models whose forward makes distributions of torch: what these ask of numbers is asked where the numbers are."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from pippy import PipelineDriver1F1B, pipeline
from pippy.drivers.base.errors import StepError

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(2))

    def forward(self, x, action):
        chosen = Normal(self.last(torch.tanh(self.first(x))), self.scale, validate_args=True)
        prior = Normal(torch.zeros_like(action), torch.ones_like(action))
        return kl_divergence(chosen, prior).sum(1) - chosen.log_prob(action).sum(1)


@pytest.mark.parametrize("with_example", [False, True])
def test_distributions_in_forward(with_example, threads):
    model, x, action, target = Policy(), torch.randn(6, 4), torch.randn(6, 2), torch.randn(6)
    plain = copy.deepcopy(model)
    nn.functional.mse_loss(plain(x, action), target).backward()
    example = (x[:2], action[:2], target[:2]) if with_example else None
    pipe = pipeline(model, nn.MSELoss(), num_stages=2, split="parameters", example_args=example)
    driver = PipelineDriver1F1B(pipe, threads)
    driver.run(2, x, action, target)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(driver.get_grad(name), parameter.grad)
    action[5, 0] = torch.nan
    with pytest.raises(ValueError, match="invalid values"):
        plain(x, action)
    with pytest.raises(StepError, match="was given 1 value that is not valid"):
        driver.run(2, x, action, target)
