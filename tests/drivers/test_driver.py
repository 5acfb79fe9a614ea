"""The headline of the runtime: on workers, every model of the zoo gives the reference's numbers, bit for bit."""

import copy

import pytest
import torch

from pippy import pipeline
from pippy.drivers.batch.specs import MicroBatches
from pippy.drivers.driver.drivers import (
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    PipelineDriverInterleaved1F1B,
)
from pippy.ir.base.trees import map_tensors
from pippy.ir.call.signature import bind
from pippy.ir.reference import run_microbatches
from tests.drivers.added_on_workers import add_as_workers_do
from tests.zoo import WAYS, exhibits

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:a mark after the model's last operation"),
]

# Each with so many micro-batches, on up to so many workers: the last has several stages on one.
DRIVERS = [(PipelineDriverFillDrain, 3, 4), (PipelineDriver1F1B, 8, 4), (PipelineDriverInterleaved1F1B, 3, 2)]


def build(name, config):
    torch.manual_seed(0)
    model = exhibits[name]()
    spec = model.output_loss_value_spec
    return model, pipeline(model, model.loss_fn, multi_use_param_spec=config, output_loss_value_spec=spec)


def assert_bits(mine, theirs):
    """The same names, and under each the same tensor, bit for bit, or none."""
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert (tensor is None) == (theirs[name] is None), name
        assert tensor is None or torch.equal(tensor, theirs[name]), (
            f"{name}: off by {(tensor - theirs[name]).abs().max()}"
        )


@pytest.mark.parametrize(("name", "config"), WAYS)
def test_the_zoo_trains_as_the_reference_does(cluster, name, config):
    """Losses are added up, so that micro-batches may have any shapes."""
    model, pipe = build(name, config)
    target = [model.target()] if model.loss_fn is not None else []
    for kind, chunks, workers in DRIVERS:
        driver = kind(pipe, cluster, world_size=min(workers, pipe.num_stages), loss_reduction="sum", check=False)
        reference = add_as_workers_do(copy.deepcopy(pipe), driver.program(chunks).placement.worker_of)
        microbatches = [map_tensors(torch.Tensor.detach, model.inputs()) for _ in range(chunks)]
        before = torch.get_rng_state()
        expected = run_microbatches(reference, [bind(reference, (*each, *target), {}) for each in microbatches])
        if not torch.equal(before, torch.get_rng_state()):
            driver.close()
            return  # it draws random numbers, and every worker draws its own
        given = [MicroBatches(list(same)) for same in zip(*microbatches)]
        loss = driver.run(chunks, *given, *(MicroBatches([each] * chunks) for each in target))
        if model.loss_fn is not None:
            assert torch.equal(loss, sum(expected))
        assert_bits(driver.gradients(), {name: reference.get_grad(name) for name, _ in pipe.named_parameters()})
        assert_bits(driver.state_dict(), reference.state_dict())
        driver.close()
