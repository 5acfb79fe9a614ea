"""What a step holds: storages that are alive are counted whenever a stage makes one more."""

import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from pippy import Max, PipelineDriver, PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.worker.step_context import StepDevice

made: dict[str, list[StorageWeakRef]] = {}
most: dict[str, int] = {}


@torch.fx.wrap
def noted(name, value):
    """The value; its storage is counted among those of this name."""
    made.setdefault(name, []).append(StorageWeakRef(value.untyped_storage()))
    most[name] = max(most.get(name, 0), sum(not each.expired() for each in made[name]))
    return value


class NotedGradient(torch.autograd.Function):
    """The value as it is; its gradient is counted."""

    @staticmethod
    def forward(ctx, name, value):
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return None, noted(ctx.name, gradient.clone())


@torch.fx.wrap
def with_noted_gradient(name, value):
    return NotedGradient.apply(name, value)


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = noted("first", self.layers[0](x))
        pipe_split()
        x = noted("second", self.layers[1](x))
        pipe_split()
        return noted("output", with_noted_gradient("gradient", self.layers[2](x)))


def loss_fn(output, target):
    return F.mse_loss(with_noted_gradient("gradient of the output", output), target)


def held(run):
    """The most storages of each name that were alive at a time while something ran."""
    made.clear()
    most.clear()
    run()
    return dict(most)


DRIVERS = {
    "1f1b": (PipelineDriver1F1B, {}),
    "one worker": (PipelineDriver1F1B, {"world_size": 1}),
    "zb_h1": (PipelineDriver, {"schedule": "zb_h1"}),
    "out of order": (PipelineDriver, {"schedule": "1f1b", "out_of_order": True}),
}


@pytest.mark.parametrize("kind", DRIVERS)
def test_what_a_step_holds_does_not_grow_with_the_micro_batches(threads, kind):
    """The input of the loss and its gradient were held to the end of the step, and with them the inputs of the last stage."""
    driver_class, options = DRIVERS[kind]
    x, target = torch.randn(64, 8), torch.randn(64, 8)
    driver = driver_class(pipeline(Three(), loss_fn), threads, loss_reduction="mean", check=False, **options)
    few, many = (held(lambda chunks=chunks: driver.run(chunks, x, target)) for chunks in (8, 32))
    assert few == many and max(many.values()) <= 3
    with torch.no_grad():
        assert set(held(lambda: driver.run(32, x, target)).values()) == {1}
        asked = held(lambda: driver.run(32, x, target, outputs=True))
    assert asked == {"first": 1, "second": 1, "output": 32}, "outputs wait for the answer, and nothing else does"


def test_a_step_that_is_done_holds_its_result_alone(threads):
    driver = PipelineDriver1F1B(pipeline(Three()), threads)
    x = torch.randn(8, 8)
    storage = StorageWeakRef(x.untyped_storage())
    with driver.record() as recording:
        step = driver.run_async(4, x)
    del x
    first = step.result()
    driver.run(4, torch.randn(8, 8))  # a thread that answers this one has let go of what it did before
    assert storage.expired(), "the inputs"
    assert step.result() is first and len(recording.steps) == 1 and step.peak_live


class LossInTheMiddle(nn.Module):
    """The last stage makes an output that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, target):
        x = self.layers[0](x)
        pipe_split()
        x = self.layers[1](x)
        loss = F.mse_loss(x, target)
        pipe_split()
        return {"loss": loss, "largest": noted("beside", torch.tanh(self.layers[2](x))).amax()}


def test_a_stage_without_a_backward_keeps_nothing_for_one(threads):
    x, target = torch.randn(64, 8), torch.randn(64, 8)
    for schedule in ("1f1b", "zb_h1"):
        options = {"schedule": schedule, "loss_reduction": "mean", "output_spec": Max()}
        driver = PipelineDriver(pipeline(LossInTheMiddle()), threads, **options)
        driver.run(32, x, target)  # the first step looks at an output twice
        assert held(lambda driver=driver: driver.run(32, x, target)) == {"beside": 1}


@pytest.mark.parametrize(("workers", "most"), [(1, 4), (3, 8)])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_inputs_are_on_the_device_from_their_forward_on(threads, monkeypatch, checkpoint, workers, most):
    """Those of all micro-batches were put there when a training step began, and waited for their turn."""
    there = {}

    def moved(place, tensor):
        if id(tensor) in there and there[id(tensor)]() is tensor:
            return tensor
        copy = noted("inputs", tensor.clone())
        there[id(copy)] = weakref.ref(copy)
        return copy

    monkeypatch.setattr(StepDevice, "takes_inputs_up", True)
    monkeypatch.setattr(StepDevice, "here", moved)
    x, target = torch.randn(64, 8), torch.randn(64, 8)
    model = Three()
    driver = PipelineDriver1F1B(
        pipeline(model, loss_fn), threads, world_size=workers, loss_reduction="mean", checkpoint=checkpoint
    )
    for trains in (True, False):
        with torch.set_grad_enabled(trains):
            assert 1 <= held(lambda: driver.run(32, x, target))["inputs"] <= (most if trains else 2 * workers)
    torch.testing.assert_close(driver.run(32, x, target), loss_fn(model(x), target).detach())
    driver.close()
