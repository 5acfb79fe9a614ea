"""v_half, v_min and eager_1f1b train the models of the zoo as the reference does, forwards computed again or not.

To rounding: what a stage receives may lie in memory otherwise than what the reference passes on, and some processors have other
kernels for that.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from pippy import MultiUseParameterConfig, PipelineDriver, pipeline
from pippy.drivers.batch.specs import MicroBatches
from pippy.ir.base.trees import map_tensors
from pippy.ir.call.signature import bind
from pippy.ir.reference import run_microbatches
from tests.drivers.models import Chain
from tests.drivers.test_driver import build
from tests.drivers.thread_cluster import thread_cluster
from tests.zoo import exhibits

pytestmark = [
    pytest.mark.usefixtures("in_float64", "seeded"),
    pytest.mark.filterwarnings("ignore:a mark after the model's last operation"),
]

MODES = ["never", "always", "except_last"]
close = partial(torch.testing.assert_close, rtol=1e-13, atol=1e-15)


@pytest.fixture(scope="module")
def workers():
    with thread_cluster(4) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "name", [each for each in exhibits if exhibits[each].loss_fn is not None and not exhibits[each].draws]
)
def test_the_zoo_trains_as_the_reference_does(workers, name):
    """With two stages on each worker, in a V, where a model has an even number of them."""
    number = list(exhibits).index(name)
    model, pipe = build(name, list(MultiUseParameterConfig)[number % 2])
    schedule, size = (
        ("eager_1f1b", pipe.num_stages)
        if pipe.num_stages % 2
        else (["v_half", "v_min"][number % 2], pipe.num_stages // 2)
    )
    reference = copy.deepcopy(pipe)
    microbatches = [map_tensors(torch.Tensor.detach, model.inputs()) for _ in range(4)]
    target = model.target()
    expected = run_microbatches(reference, [bind(reference, (*each, target), {}) for each in microbatches])
    driver = PipelineDriver(
        pipe,
        workers,
        schedule=schedule,
        checkpoint=MODES[number % 3],
        loss_reduction="sum",
        check=False,
        world_size=min(size, 4),
    )
    given = [*(MicroBatches(list(same)) for same in zip(*microbatches)), MicroBatches([target] * 4)]
    close(driver.run(4, *given), sum(expected))
    close(driver.gradients(), {name: reference.get_grad(name) for name, _ in pipe.named_parameters()})
    close(driver.state_dict(), reference.state_dict())
    driver.close()


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ["v_half", "v_min", "eager_1f1b"])
def test_a_step_is_that_of_plain_pytorch(workers, schedule, checkpoint):
    """Four workers, so that the three differ from other schedules; they hold as many micro-batches as the program says."""
    model = Chain(4 if schedule == "eager_1f1b" else 8)
    plain = copy.deepcopy(model)
    driver = PipelineDriver(pipeline(model, nn.MSELoss()), workers, schedule=schedule, checkpoint=checkpoint)
    x, target = torch.randn(18, 8), torch.randn(18, 8)
    step = driver.run_async(9, x, target)
    loss = nn.functional.mse_loss(plain(x), target)
    loss.backward()
    torch.testing.assert_close(step.result(), loss.detach(), rtol=1e-12, atol=0)
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
    assert [step.peak_live[rank] for rank in driver.ranks] == list(driver.program(9).peak_live)
    driver.close()
