"""Layers that are called with other tensors than their own train as in the plain model. Each ran with its own, silently."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from pippy import PipelineDriver1F1B, pipeline
from pippy.errors import PippyWarning

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer, self.other, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.block, self.block2 = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.first(x))))


class WithAnothers(Net):
    def middle(self, x):
        return functional_call(self.layer, dict(self.other.named_parameters()), (x,)) + self.layer(x)


class BlockWithAnothers(Net):
    def middle(self, x):
        return functional_call(self.block, dict(self.block2.named_parameters()), (x,)) + self.block(x)


def with_made(self, x):
    made = {"weight": self.layer.weight * self.scale, "bias": self.layer.bias}
    return functional_call(self.layer, made, (x,))


class Made(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.layer, self.scale = of.layer, of.scale

    forward = with_made


class WithMade(Net):
    """In a module of its own, as the error says."""

    def __init__(self):
        super().__init__()
        self.made = Made(self)

    def middle(self, x):
        return self.made(x)


class Assigned(Net):
    def __init__(self):
        super().__init__()
        del self.layer.weight

    def middle(self, x):
        self.layer.weight = self.other.weight * self.scale
        return self.layer(x)


@pytest.mark.parametrize("kind", [WithAnothers, BlockWithAnothers, WithMade, Assigned])
def test_a_layer_that_is_called_with_other_tensors(kind, threads):
    model, x, target = kind(), torch.randn(6, 4), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    nn.functional.mse_loss(plain(x), target).backward()
    example = (x[:2], target[:2])
    pipe = pipeline(model, nn.MSELoss(), num_stages=2, split="parameters", example_args=example)
    driver = PipelineDriver1F1B(pipe, threads)
    driver.run(2, x, target)
    for name, parameter in plain.named_parameters():
        gradient = driver.get_grad(name)
        assert (gradient is None or not gradient.any()) if parameter.grad is None else gradient is not None, name
        if parameter.grad is not None:
            torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("with_example", [False, True])
def test_a_call_with_computed_tensors_keeps_the_models_own_forward_whole(with_example):
    x = torch.randn(6, 4)
    model = type("InItsOwnForward", (Net,), {"middle": with_made})()
    with pytest.warns(PippyWarning, match="into the forward of a module of its own"):
        pipe = pipeline(model, nn.MSELoss(), **({"example_args": (x, x)} if with_example else {}))
    assert pipe.num_stages == 1
    torch.testing.assert_close(pipe(x, x), nn.functional.mse_loss(model(x), x))
