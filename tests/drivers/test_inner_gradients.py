"""Models that differentiate in forward train on workers as the plain model: forces of a potential, among others."""

import copy

import pytest
import torch
from torch.nn import functional as F

from pippy import PipelineDriver, pipeline
from pippy.drivers.base.errors import StepError
from tests.ir.cut.test_ways import MODELS, TARGET, Critic, Net, X, penalized_silently, penalty_of

pytestmark = [pytest.mark.usefixtures("in_float64", "seeded"), pytest.mark.filterwarnings("ignore::pippy.PippyWarning")]
OF_ROWS = [name for name in MODELS if "parameter" not in name and name not in ("inner loop", "of two values")]


def check_steps(driver, plain, loss_fn):
    for _ in range(2):
        plain.zero_grad()
        driver.zero_grad()
        loss = loss_fn(plain(X.clone()), TARGET)
        loss.backward()
        torch.testing.assert_close(driver.run(3, X.clone(), TARGET), loss.detach(), rtol=1e-12, atol=1e-14)
        found = driver.gradients()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", OF_ROWS)
def test_gradients_through_gradients_are_those_of_the_plain_model(cluster, name, schedule):
    model = Net(MODELS[name])
    plain = copy.deepcopy(model)
    driver = PipelineDriver(pipeline(model, F.mse_loss, num_stages=2), cluster, schedule=schedule)
    check_steps(driver, plain, F.mse_loss)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_gradient_penalty_is_refused_in_the_loss_and_right_in_forward(cluster, schedule):
    critic = Critic(with_gradient=False)
    with pytest.raises(StepError, match="return it beside the output"):
        PipelineDriver(pipeline(critic, penalized_silently), cluster, schedule=schedule).run(3, X, TARGET)
    advised = Critic(with_gradient=True)
    plain = copy.deepcopy(advised)

    def loss_fn(output, target):
        return output[0].mean() + penalty_of(output[1])

    check_steps(PipelineDriver(pipeline(advised, loss_fn), cluster, schedule=schedule), plain, loss_fn)
