"""Lists of layers, with functions among them."""

import functools

import pytest
import torch
from torch import nn

from pippy import LayerSpec, Pipe, TiedLayerSpec
from pippy.ir.base.errors import InitializationError, TracingError

torch.manual_seed(0)
GLOBAL = nn.Linear(4, 4)
X = torch.randn(6, 4, dtype=torch.float64)


def scale(x, by=2.0):
    return x * by


class Twice:
    def __call__(self, x):
        return torch.cat([x, x], 1)


def layers_of(linear, last):
    return [linear, torch.relu, functools.partial(scale, by=3.0), Twice(), lambda x: x.flip(1), last]


def made():
    return nn.Linear(4, 5).double(), nn.Linear(10, 1).double()


def test_functions_are_layers():
    linear, last = made()
    pipe = Pipe.from_sequential(layers_of(linear, last))
    expected = last((torch.cat([torch.relu(linear(X)) * 3] * 2, 1)).flip(1))
    assert pipe.num_stages == 6
    assert torch.equal(pipe(X), expected)
    assert [name for name, _ in pipe.named_parameters()] == ["0.weight", "0.bias", "5.weight", "5.bias"]
    assert pipe.get_parameter("0.weight") is linear.weight


def test_module_lists_are_layers():
    assert Pipe.from_sequential(nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])).num_stages == 2


@pytest.mark.parametrize(
    "layer",
    [
        lambda layer: lambda x: x @ layer.weight.T,
        lambda layer: lambda x, weight=layer.weight: x @ weight,
        lambda layer: lambda x: GLOBAL(x),
        lambda layer: layer.forward,
        lambda layer: functools.partial(nn.functional.linear, weight=layer.weight),
        lambda layer: Calls(layer),
    ],
)
def test_functions_with_parameters_are_refused(layer):
    with pytest.raises(TracingError, match=r"layer 1 is a function that holds parameters.*write a module"):
        Pipe.from_sequential([nn.ReLU(), layer(nn.Linear(4, 4))])


class Calls:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


class NeedsNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, int(torch.ones(4).sum()))


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (
            [LayerSpec(nn.Linear, 4)],
            "layer 0, LayerSpec\\(Linear, 4\\), could not be made on the meta device.*TypeError",
        ),
        ([LayerSpec(NeedsNumbers)], "could not be made on the meta device.*give the layer itself"),
        (
            [TiedLayerSpec("a", nn.Linear, 4, 4), TiedLayerSpec("a", nn.Linear, 4, 5)],
            "layer 1 is TiedLayerSpec\\(Linear, 4, 5\\), and an earlier one with the key 'a' is .*or two keys",
        ),
        ([nn.ReLU], r"layer 0 is the class ReLU; give an instance of it: ReLU\(\.\.\.\)"),
        ([nn.ReLU(), 3], "layer 1 is a int; give a module, a LayerSpec, or a function of one value"),
    ],
)
def test_what_is_no_layer_is_refused(layers, text):
    with pytest.raises(TracingError, match=text):
        Pipe.from_sequential(layers)


def test_a_specification_is_of_a_module():
    with pytest.raises(
        InitializationError, match="LayerSpec was given a ReLU; give the class of a module, and then its arguments"
    ):
        LayerSpec(nn.ReLU())
    with pytest.raises(InitializationError, match=r"LayerSpec\(dict\) gives a dict, and a layer is a module"):
        Pipe.from_sequential([LayerSpec(dict)])


def test_layers_are_made_on_meta_and_mixed_with_others():
    linear = nn.Linear(4, 4)
    pipe = Pipe.from_sequential([LayerSpec(nn.Linear, 4, 4, bias=False), torch.relu, linear])
    assert [(name, each.device.type) for name, each in pipe.named_parameters()] == [
        ("0.weight", "meta"),
        ("2.weight", "cpu"),
        ("2.bias", "cpu"),
    ]
