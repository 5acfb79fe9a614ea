"""A small part that does other operations in training than in evaluation is kept whole, and the Pipe follows both modes."""

import pytest
import torch
from torch import nn

from pippy import pipeline
from pippy.errors import ModeError
from tests.comparisons import assert_same_gradients, twin


class Counted(nn.BatchNorm1d):
    """As the norms of timm, which call the function themselves."""

    def forward(self, x):
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )


class DropPath(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        return x * torch.rand(x.shape[0], 1, dtype=x.dtype).add_(0.9).floor_() / 0.9


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), Counted(4), DropPath()

    def forward(self, x):
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("first", [True, False])
def test_both_modes_are_followed(first):
    torch.manual_seed(0)
    model, x = Net().double().train(first), torch.randn(5, 4, dtype=torch.float64)
    plain = twin(model)
    pipe = pipeline(model, num_stages=3, split="parameters", output_loss_value_spec=True, example_args=[x])
    assert pipe.num_stages == 3 and set(pipe.kept_whole) == {
        f"blocks.{index}.{part}" for index in range(3) for part in ("norm", "drop")
    }
    for training in (True, False, True):
        pipe.train(training), plain.train(training)
        torch.manual_seed(1)
        loss = pipe(x)
        torch.manual_seed(1)
        expected = plain(x)
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
        assert_same_gradients(pipe, plain)
        assert torch.equal(model.blocks[1].norm.num_batches_tracked, plain.blocks[1].norm.num_batches_tracked)


class OnlyTrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.extra = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        x = self.layers(x)
        return self.extra(x) if self.training else x


def test_a_part_with_layers_of_its_own_is_not():
    model, x = nn.Sequential(OnlyTrained(), nn.Linear(4, 4)), torch.randn(5, 4)
    pipe = pipeline(model, num_stages=3, split="parameters", output_loss_value_spec=False, example_args=[x])
    assert pipe.num_stages == 3 and not pipe.kept_whole
    with pytest.raises(ModeError):
        pipe.eval()(x)
