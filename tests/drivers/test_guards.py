"""A driver refuses a call for which forward would do something else, before anything is sent."""

import re

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.base.errors import MicrobatchError, StepError
from pippy.ir.base.errors import InputError

X = torch.randn(6, 4, dtype=torch.float64)


class Fixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        if x.shape[0] > 3:
            x = x * 2
        x = self.second(self.first(x))
        pipe_split()
        return x.sum(1) if x.size(1) > 2 else x


def test_each_micro_batch_is_checked_before_anything_is_sent(threads):
    model = Fixes().double()
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss(), example_args=(X, X[:, 0])), threads)
    first = driver.run(1, X, X[:, 0])
    with pytest.raises(MicrobatchError, match=r"(?s)depends on the number of rows.*chunks=1"):
        driver.run(2, X, X[:, 0])  # micro-batches of three rows
    driver.copy_to(model)
    assert model.second.num_batches_tracked == 1
    more = torch.cat([X, X])
    assert torch.isfinite(driver.run(2, more, more[:, 0])) and torch.isfinite(first)
    driver.copy_to(model)
    assert model.second.num_batches_tracked == 3


class AsksForRows(nn.Module):
    """The number of rows is asked of an input, or of what a stage has computed."""

    def __init__(self, of_input):
        super().__init__()
        self.first, self.last, self.of_input = nn.Linear(4, 4), nn.Linear(4, 2), of_input

    def forward(self, x):
        h = self.first(x)
        assert len(x if self.of_input else h) == 6
        return self.last(h)


@pytest.mark.parametrize(
    ("of_input", "error", "told"),
    [
        (True, InputError, "These are the sizes of micro-batch 0, which has rows 0 to 2 of 6"),
        (False, StepError, r"stage 0, micro-batch 0, rows 0 to 2 of 6\)"),
    ],
)
def test_rows_in_errors_are_those_of_the_call(of_input, error, told, threads):
    x, target = torch.ones(6, 4), torch.ones(6, 2)
    pipe = pipeline(AsksForRows(of_input), nn.MSELoss(), num_stages=2, split="parameters", example_args=(x, target))
    driver = PipelineDriver1F1B(pipe, threads)
    with pytest.raises(error, match=told) as caught:
        driver.run(2, x, target)
    assert "forward depends on the number of rows" in str(caught.value)
    assert re.search(
        "What to do: make another Pipe .*, or run one micro-batch, chunks=1$", str(caught.value), re.MULTILINE
    )
    driver.run(1, x, target)


def test_a_loss_that_a_model_returns_and_nobody_was_told_of(threads):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.last(self.first(x)).pow(2).mean()

    x = torch.randn(6, 4)
    with pytest.raises(MicrobatchError, match=r"make the Pipe with pipeline\(..., output_loss_value_spec=True\)$"):
        PipelineDriver1F1B(pipeline(Returns(), num_stages=2, split="parameters"), threads).run(2, x)
    pipe = pipeline(Returns(), num_stages=2, split="parameters", output_loss_value_spec=True)
    driver = PipelineDriver1F1B(pipe, threads)
    driver.run(2, x)
    assert driver.get_grad("first.weight").any()
