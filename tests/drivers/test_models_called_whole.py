"""A model that one stage calls as a whole trains on a worker as the plain model does, whichever way its forward branches."""

import pytest
import torch
from torch.nn import functional as F

from pippy import PipelineDriver1F1B, pipeline
from tests.comparisons import assert_same, twin
from tests.ir.trace.test_kept_whole import Net, X

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def test_its_steps_on_a_worker_are_those_of_the_plain_model(cluster):
    model = Net().eval()
    plain, start = twin(model), twin(model)
    driver = PipelineDriver1F1B(pipeline(model, F.mse_loss, split="parameters", num_stages=1), cluster, world_size=1)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    own, branches = torch.optim.SGD(plain.parameters(), lr=0.1), set()
    for sign in (1, -1, 1):
        loss, expected = driver.run(1, sign * X, target=X), F.mse_loss(plain(sign * X), X)
        expected.backward()
        branches.add(plain._model.weight.grad is not None and bool(plain._model.weight.grad.any()))
        optimizer.step(), optimizer.zero_grad(), own.step(), own.zero_grad()
        assert_same(loss, expected.detach(), "loss")
    assert branches == {True, False}
    assert_same(driver.state_dict(), plain.state_dict(), "state")
    driver.copy_to(start)
    assert_same(start.state_dict(), plain.state_dict(), "state")
    driver.close()
