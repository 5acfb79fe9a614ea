"""The reference keeps a value until its last use, and no longer."""

import weakref

import pytest
import torch
from torch import nn

from pippy import Pipe
from pippy.ir.pipe import compiled_of
from pippy.ir.reference import run_microbatches

STAGES = 6


class Counted(torch.autograd.Function):
    """The identity; its backward counts the outputs of stages that are still there."""

    @staticmethod
    def forward(ctx, value, layer):
        ctx.layer = layer
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.in_backward.append(ctx.layer.alive())
        return gradient, None


class Counting(nn.Module):
    """A layer that counts, when it begins, how many outputs of stages are still there."""

    def __init__(self, made, in_forward, in_backward):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.made, self.in_forward, self.in_backward = made, in_forward, in_backward

    def alive(self):
        return sum(each() is not None for each in self.made)

    def forward(self, x):
        self.in_forward.append(self.alive())
        output = Counted.apply(self.linear(x), self)
        self.made.append(weakref.ref(output))
        return output


def counting_pipe(loss_fn=None):
    made, in_forward, in_backward = [], [], []
    layers = [Counting(made, in_forward, in_backward) for _ in range(STAGES)]
    return Pipe.from_sequential(nn.Sequential(*layers), loss_fn), in_forward, in_backward


@pytest.mark.parametrize("loss_fn", [None, nn.MSELoss()])
def test_without_gradients_each_stage_finds_its_input_alone(loss_fn):
    pipe, in_forward, _ = counting_pipe(loss_fn)
    with torch.no_grad():
        pipe(torch.randn(2, 4), *([torch.randn(2, 4)] if loss_fn else []))
    assert in_forward == [0] + [1] * (STAGES - 1)


def test_a_backward_frees_the_outputs_of_its_stage():
    pipe, in_forward, in_backward = counting_pipe(nn.MSELoss())
    pipe(torch.randn(2, 4), torch.randn(2, 4))
    assert in_forward == list(range(STAGES))
    assert in_backward == list(range(STAGES, 0, -1))


def test_a_micro_batch_leaves_its_outputs_alone():
    pipe, in_forward, _ = counting_pipe()
    with torch.no_grad():
        run_microbatches(compiled_of(pipe), [{"input_1": torch.randn(2, 4)}, {"input_1": torch.randn(2, 4)}])
    assert in_forward == [0] + [1] * STAGES + [2] * (STAGES - 1)
