"""A driver refuses a call for which forward would do something else, before anything is sent."""

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.ir.errors import InputError

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
    with pytest.raises(InputError, match=r"(?s)went on for True; now it is False.*test_guards.py:\d+, in forward"):
        driver.run(2, X, X[:, 0])  # micro-batches of three rows
    driver.copy_to(model)
    assert model.second.num_batches_tracked == 1
    more = torch.cat([X, X])
    assert torch.isfinite(driver.run(2, more, more[:, 0])) and torch.isfinite(first)
    driver.copy_to(model)
    assert model.second.num_batches_tracked == 3
