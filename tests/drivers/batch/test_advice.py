"""What a message says to write works when it is written: the step runs, with the plain model's numbers."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import (  # noqa: F401 - advice uses them
    Mean,
    MicroBatches,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    Replicate,
    Sum,
    TensorChunkSpec,
    pipe_split,
    pipeline,
)
from pippy.drivers.base.errors import DriverError, MicrobatchError
from tests.drivers.models import Chain

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
EYE = torch.eye(4, dtype=torch.float64)


class Net(nn.Module):
    """Takes a mask, or anything that holds some."""

    def __init__(self, mask=lambda given: given):
        super().__init__()
        self.a, self.b, self.mask = nn.Linear(4, 6), nn.Linear(6, 4), mask

    def forward(self, x, mask=None):
        x = torch.relu(self.a(x))
        pipe_split()
        x = self.b(x)
        return x if mask is None else x @ self.mask(mask)


def advised(error, name):
    """The value that a message gives to an argument of the driver, as it is written there."""
    (found,) = re.findall(rf"{name}=(.*?)(?:; if not|; or |$|\n)", str(error.value))
    return {name: eval(found, globals())}


@pytest.mark.parametrize(
    ("mask", "get"),
    [
        (EYE, lambda mask: mask),
        ({"m": EYE, "scale": 2}, lambda mask: mask["m"]),
        ([torch.ones(7, 1), EYE], lambda mask: mask[1]),
        ((EYE, {"n": EYE}), lambda mask: mask[0] @ mask[1]["n"]),
    ],
)
def test_different_numbers_of_rows(threads, mask, get):
    model, x, target = Net(get), torch.randn(7, 4), torch.randn(7, 4)
    pipe = pipeline(copy.deepcopy(model), nn.MSELoss())
    with pytest.raises(MicrobatchError, match="different numbers of rows") as error:
        PipelineDriver1F1B(pipe, threads).run(3, x, mask, target)
    driver = PipelineDriver1F1B(pipe, threads, **advised(error, "chunk_spec"))
    torch.testing.assert_close(driver.run(3, x, mask, target), F.mse_loss(model(x, mask), target))


def test_the_first_of_two_numbers_of_rows_is_the_batch_s(threads):
    model, x = Net(), torch.randn(2, 4)
    with pytest.raises(MicrobatchError, match="different numbers of rows") as error:
        PipelineDriver1F1B(pipeline(copy.deepcopy(model)), threads).run(2, x, torch.eye(4))
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model)), threads, **advised(error, "chunk_spec"))
    with torch.no_grad():
        torch.testing.assert_close(driver.run(2, x, torch.eye(4)), model(x, torch.eye(4)))


def test_names_in_messages_are_arguments_of_the_driver(threads):
    pipe, x = pipeline(Chain(2, 4), F.cross_entropy), (torch.randn(4, 4), torch.tensor([0, 1, 2, 3]))
    for given, words in [
        ({"chunk_spec": {"y": 0}}, "chunk_spec names"),
        ({"batch_dims": {"y": 1}}, "batch_dims names"),
        ({"loss_reduction": "tokens"}, "loss_reduction=lambda target"),
        ({"loss_reduction": lambda target: -1}, "loss_reduction returned"),
        ({"loss_reduction": lambda wrong, two: 1}, r"loss_reduction\(wrong, two\)"),
    ]:
        with pytest.raises(MicrobatchError, match=words):
            PipelineDriver1F1B(pipe, threads, **given).run(2, *x)


def test_an_unknown_reduction(threads):
    model, x, target = Chain(2, 4), torch.randn(5, 4), torch.tensor([0, -100, -100, 1, 2])
    pipe = pipeline(copy.deepcopy(model), F.cross_entropy)
    with pytest.raises(MicrobatchError, match="'tokens'") as error:
        PipelineDriver1F1B(pipe, threads, loss_reduction="tokens").run(2, x, target)
    driver = PipelineDriver1F1B(pipe, threads, **advised(error, "loss_reduction"))
    torch.testing.assert_close(driver.run(2, x, target), F.cross_entropy(model(x), target))


def test_too_few_rows(threads):
    driver = PipelineDriver1F1B(pipeline(Chain(2, 4)), threads)
    with pytest.raises(MicrobatchError, match="chunks=3 or less"):
        driver.run(4, torch.randn(3, 4))
    with torch.no_grad():
        assert driver.run(3, torch.randn(3, 4)).shape == (3, 4)


def test_one_loss_over_the_whole_mini_batch(threads):
    with pytest.raises(DriverError, match="PipelineDriverFillDrain"):
        PipelineDriver1F1B(pipeline(Chain(2, 4), nn.MSELoss()), threads, single_loss=True)
    driver = PipelineDriverFillDrain(pipeline(Chain(2, 4), nn.MSELoss()), threads, single_loss=True)
    driver.run(2, torch.randn(4, 4), torch.randn(4, 4))
