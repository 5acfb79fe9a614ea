"""Buffers that forward assigns anew, in steps of a driver: they are those of the plain model."""

import copy

import pytest
from torch import nn

from pippy import pipeline
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from tests.comparisons import assert_same, run_plain
from tests.ir.trace.test_assigned_buffers import Assigns, batch, counts, reads_before_and_after, swaps

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("act", [counts, reads_before_and_after, swaps])
def test_a_driver_changes_them_once_in_a_step(act, checkpoint, chunks, threads):
    model = Assigns(act)
    plain = copy.deepcopy(model)
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads, checkpoint=checkpoint)
    for _ in range(2):
        x, target = batch()
        plain.zero_grad()
        driver.zero_grad()
        expected = run_plain(plain, nn.MSELoss(), None, (x,), target)
        assert_same(driver.run(chunks, x, target), expected, "loss")
        for name, parameter in plain.named_parameters():
            assert_same(driver.get_grad(name), parameter.grad, f"gradient of {name}")
    assert_same(driver.state_dict(), plain.state_dict(), "state")
    driver.close()
