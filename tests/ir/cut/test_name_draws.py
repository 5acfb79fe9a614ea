"""Which operations of a Pipe seed the generators first, and that their names do not depend on the marks."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import DeferredBatchNorm, Pipe, SplitPoint, annotate_split_points, clear_split_points, keyed_random, pipeline
from pippy.ir.run.random_state import draw_key, seed_draws


def names(pipe):
    """What is seeded, in order, and the nodes that are seeded for."""
    found = []
    for _, stage in pipe.stages():
        for node in stage.graph.find_nodes(op="call_function", target=seed_draws):
            found.append((node.args[1], node.next.name))
    return found


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.none = nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.0)

    def forward(self, x):
        x = F.dropout(self.dropout(self.linear(x)), 0.2, self.training) + F.dropout(x, 0.0)
        seen = F.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        return self.none(self.dropout(x)) + seen + torch.randn_like(x).uniform_()


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.parts[0](x) + torch.rand(4)


def test_names_are_those_of_the_model_wherever_it_is_cut():
    model, found = Parts(), []
    for cuts in ([0], [1], [1, 2]):
        clear_split_points(model)
        annotate_split_points(model, {f"parts.{number}": SplitPoint.END for number in cuts})
        pipe = pipeline(model)
        assert pipe.num_stages > 1
        found.append(names(pipe))
    assert found[0] == found[1] == found[2]
    once = ["dropout", ":dropout", "dropout#1", ":randn_like", ":uniform_"]
    again = ["dropout#2", ":dropout#1", "dropout#3", ":randn_like#1", ":uniform_#1"]
    wanted = [f"parts.{number}{'' if name[0] == ':' else '.'}{name}" for number in range(3) for name in once]
    wanted += [f"parts.0{'' if name[0] == ':' else '.'}{name}" for name in again]
    assert [name for name, _ in found[0]] == [*wanted, ":rand"]
    assert len(set(found[0])) == len(found[0])


def test_what_draws_nothing_costs_nothing():
    layers = [
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.LSTM(4, 4),
        nn.MultiheadAttention(4, 1),
        nn.TransformerEncoderLayer,
    ]
    layers[-1] = nn.TransformerEncoderLayer(4, 1, dropout=0.0)
    layers += [DeferredBatchNorm(4), nn.Sequential(nn.ReLU(), nn.Dropout(0)), torch.relu, F.gelu]
    layers += [lambda x: F.relu(x.flatten(1)).softmax(-1) * len(x), lambda x: calm(x) + math.pi]
    pipe = Pipe.from_sequential(layers)
    assert names(pipe) == []
    assert not any(stage.graph.find_nodes(op="call_function", target=draw_key) for _, stage in pipe.stages())


def calm(x):
    return next(torch.tanh(each) for each in x)


def draws(x):
    return x + torch.randn_like(x)


def calls_another(x):
    return draws(calm(x))


class Stranger:
    def scaled(self, x):
        return x * torch.rand(())


STRANGER = Stranger()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout2d(0.1),
        nn.RReLU(),
        nn.GRU(4, 4, 2, dropout=0.1),
        nn.MultiheadAttention(4, 1, dropout=0.1),
        nn.TransformerEncoderLayer(4, 1),
        nn.FractionalMaxPool2d(2, output_ratio=0.5),
        nn.Sequential(nn.Sequential(nn.Dropout())),
        F.dropout,
        F.gumbel_softmax,
        torch.bernoulli,
        calls_another,
        lambda x: STRANGER.scaled(x),
        functools.partial(torch.add, other=1),
        Part(),
    ],
)
def test_what_may_draw(layer):
    assert [name for name, _ in names(Pipe.from_sequential([layer, nn.ReLU()]))] == ["0"]


def test_hooks_and_parametrizations_are_anyones_code():
    hooked, parametrized = nn.Linear(2, 2), nn.utils.parametrize.register_parametrization
    hooked.register_forward_hook(lambda module, args, output: output + torch.rand(()))
    noisy = nn.Linear(2, 2)
    parametrized(noisy, "weight", nn.Dropout())
    assert [name for name, _ in names(Pipe.from_sequential([hooked, nn.ReLU(), noisy]))] == ["0", "2"]


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.floor(x + torch.rand_like(x))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounds(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Rounded.apply(self.linear(Rounded.apply(x)))


def test_an_autograd_function_has_its_name():
    model = Rounds()
    annotate_split_points(model, {"linear": SplitPoint.END})
    pipe = pipeline(model, example_args=(torch.ones(2, 4),))
    assert [name for name, _ in names(pipe)] == [":Rounded", ":Rounded#1"]
    x = torch.full((2, 4), 0.5)
    with keyed_random(1):
        one = pipe(x)
    with keyed_random(1):
        assert torch.equal(pipe(x), one)
