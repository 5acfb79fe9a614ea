"""Trains a model on workers beside plain PyTorch: losses, gradients and what is trained must be the same."""

import copy

import pytest
import torch

from pippy import PipelineDriver, pipeline
from tests.comparisons import assert_same, assert_same_gradient, fresh_inputs

RATE = 0.05
# One micro-batch, and three of uneven sizes: batches have 7 rows.
WAYS = (("fill_drain", 1), ("1f1b", 3), ("zb_h1", 3), ("fill_drain", 3))
in_all_ways = pytest.mark.parametrize(("schedule", "chunks"), WAYS)
in_micro_batches = pytest.mark.parametrize("schedule", ["fill_drain", "1f1b", "zb_h1"])
ROWS = 7


def assert_same_steps(
    model, loss_fn, batches, workers, schedule="1f1b", chunks=3, *, pipe=None, trained=None, **options
):
    """A step for each batch, whose target is the last of its values; without ``loss_fn`` the model returns its loss.

    ``trained`` are the first letters of the names of parameters that the optimizer has, if not all. ``pipe`` makes the Pipe in
    another way than `pipeline`, of the model and its loss. Options are those of the driver.
    """
    plain = copy.deepcopy(model)
    plain_loss_fn = loss_fn if not hasattr(loss_fn, "__self__") else getattr(plain, loss_fn.__name__)
    driver = PipelineDriver((pipe or cut)(model, loss_fn), workers, schedule=schedule, **options)
    groups = {} if trained is None else {"param_groups": [{"params": [f"{trained}*"]}]}
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=RATE, **groups)
    named = [each for name, each in plain.named_parameters() if trained is None or name.startswith(trained)]
    plain_optimizer = torch.optim.SGD(named, lr=RATE)
    for number, batch in enumerate(batches):
        expected = plain_step(plain, plain_loss_fn, fresh_inputs(batch))  # forward may change its inputs
        assert_same(driver.run(chunks, *batch), expected, f"loss of step {number}")
        for name, gradient in driver.gradients().items():
            assert_same_gradient(gradient, plain.get_parameter(name).grad, f"step {number}: gradient of {name}")
        for each in (optimizer, plain_optimizer):
            each.step()
        driver.zero_grad()
        plain.zero_grad()
    state = driver.state_dict()
    for name, value in plain.state_dict().items():
        assert_same(state[name], value, name)
    driver.close()


def cut(model, loss_fn):
    return pipeline(model, loss_fn) if loss_fn is not None else pipeline(model, output_loss_value_spec=True)


def plain_step(model, loss_fn, batch):
    loss = model(*batch) if loss_fn is None else loss_fn(model(*batch[:-1]), batch[-1])
    loss.backward()
    return loss.detach()
