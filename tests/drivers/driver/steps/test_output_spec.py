"""A driver's output_spec for a model that returns its loss beside other things."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import Mean, Replicate, Sum, TensorChunkSpec, pipe_split, pipeline
from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.specs import ChunkSpec
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from tests.drivers.models import Chain

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class ReturnsLoss(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.a, self.b, self.make = nn.Linear(8, 8), nn.Linear(8, 8), make

    def forward(self, x, target):
        x = self.a(x)
        pipe_split()
        x = self.b(x)
        return self.make(F.mse_loss(x, target), x)


MAKERS = {
    "tuple": lambda loss, y: (loss, y),
    "dict": lambda loss, y: {"loss": loss, "y": y},
    "nested": lambda loss, y: [{"loss": loss}, y],
}
PLACES = {
    "tuple": lambda loss, y: (loss, y),
    "dict": lambda loss, y: {"y": y} if loss is None else {"loss": loss, "y": y},
    "nested": lambda loss, y: [None if loss is None else {"loss": loss}, y],
}
FITTING = [TensorChunkSpec(0), 0, torch.cat, None]


def parts(output):
    if isinstance(output, dict):
        return output["loss"], output["y"]
    return (output[0]["loss"] if isinstance(output[0], dict) else output[0]), output[1]


def made(threads, kind):
    model = ReturnsLoss(MAKERS[kind])
    mark = {"tuple": (True, False), "dict": {"loss": True, "y": False}, "nested": [{"loss": True}, False]}[kind]
    return model, pipeline(model, output_loss_value_spec=mark)


@pytest.mark.parametrize("kind", MAKERS)
def test_specs_for_the_rest(threads, kind):
    model, pipe = made(threads, kind)
    x, target = torch.randn(7, 8), torch.randn(7, 8)
    loss, y = parts(model(x, target))
    for spec in [*(PLACES[kind](None, each) for each in FITTING), TensorChunkSpec(0), 0, None]:
        driver = PipelineDriver1F1B(pipe, threads, output_spec=spec)
        for found, expected in zip(parts(driver.run(3, x, target)), (loss, y)):
            torch.testing.assert_close(found, expected)
        driver.close()
    driver = PipelineDriver1F1B(pipe, threads, output_spec=Sum())  # for all but the loss
    same = x[:2].repeat(3, 1), target[:2].repeat(3, 1)
    found = parts(driver.run(3, *same))
    torch.testing.assert_close(found[0], parts(model(*same))[0])
    torch.testing.assert_close(found[1], 3 * parts(model(*same))[1][:2])
    driver.close()


class First(ChunkSpec):
    def merge(self, values):
        return values[0]


WRONG = [Sum(), Mean(), Replicate(), 0, torch.stack, First()]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_spec_for_the_loss_is_refused_before_anything_is_sent(threads, kind):
    _, pipe = made(threads, kind)
    specs = [PLACES[kind](wrong, 0) for wrong in WRONG] + [torch.stack, First()]
    for spec in specs:
        driver = PipelineDriver1F1B(pipe, threads, output_spec=spec)
        before = list(threads.session.counts)
        with pytest.raises(MicrobatchError, match=r"the loss, which is always merged by its weights.*None"):
            driver.run(3, torch.randn(7, 8), torch.randn(7, 8))
        assert threads.session.counts == before
        driver.close()


def test_a_spec_of_a_pipe_with_a_loss_function_is_for_the_outputs(threads):
    """Not for the loss, which is put together by its weights."""
    model, x, target = Chain(2), torch.randn(7, 8), torch.randn(7, 8)
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads, output_spec=Stacked())
    expected = F.mse_loss(model(x), target)
    torch.testing.assert_close(driver.run(3, x, target), expected.detach())
    loss, outputs = driver.run(3, x, target, outputs=True)
    torch.testing.assert_close(loss, expected.detach())
    assert [len(each) for each in outputs] == [3, 2, 2]
    driver.close()


class Stacked(ChunkSpec):
    def merge(self, values):
        return values
