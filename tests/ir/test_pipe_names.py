"""A Pipe has the names of the user's model: what it offers itself never stands in front of a part of the model."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

from pippy import Pipe, pipe_split, pipeline
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import make_schedule
from pippy.ir.pipe import compiled_of
from tests.comparisons import assert_same

SAMPLE = Pipe.from_sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
OFFERED = sorted(set(dir(SAMPLE)) - {*dir(nn.Module()), "0", "1"})
X, TARGET = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)


class WithPart(nn.Module):
    """A model with a module, a parameter or a buffer that has a given name."""

    def __init__(self, name, kind):
        super().__init__()
        self.name = name
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        if kind == "module":
            self.add_module(name, nn.Linear(4, 4))
        elif kind == "parameter":
            self.register_parameter(name, nn.Parameter(torch.randn(4)))
        else:
            self.register_buffer(name, torch.randn(4))
        self.double()

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        part = getattr(self, self.name)
        return self.last(part(x) if isinstance(part, nn.Module) else x * part)


def part_of(module, name, kind):
    """The part as torch finds it by its name."""
    return getattr(module, {"module": "get_submodule", "parameter": "get_parameter", "buffer": "get_buffer"}[kind])(
        name
    )


def loss_of(model):
    """A step of the plain model: its loss, with gradients left in the parameters."""
    loss = nn.functional.mse_loss(model(X), TARGET)
    loss.backward()
    return loss


def train(module, step):
    """Two steps of SGD; gives the losses."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(step(module).detach())
        optimizer.step()
    return losses


def test_names_are_offered():
    assert {"split_gm", "num_stages", "stages", "loss", "balance", "remap_qualname", "from_tracing"} <= set(OFFERED)
    assert SAMPLE.num_stages == 2
    assert not [name for name in vars(SAMPLE) if name in OFFERED]


@pytest.mark.parametrize("kind", ["module", "parameter", "buffer"])
@pytest.mark.parametrize("name", OFFERED)
def test_a_part_of_the_model_comes_before_what_a_pipe_offers(name, kind):
    model = WithPart(name, kind)
    plain = copy.deepcopy(model)
    pipe = pipeline(model, nn.MSELoss())
    assert getattr(pipe, name) is part_of(pipe, name, kind) is getattr(model, name)
    if kind == "module":
        assert pipe.get_parameter(f"{name}.weight") is getattr(model, name).weight
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert_same(functional_call(plain, pipe.state_dict(), (X,)), plain(X), name)
    lower(pipe, make_schedule("1f1b", workers=2, chunks=2))
    assert "submod_1" in str(pipe)

    pipes = pipe, copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))
    before = copy.deepcopy(plain.state_dict())
    expected = train(plain, loss_of)
    for each in pipes:
        each.eval().train()
        assert_same(train(each, lambda trained: trained(X, TARGET)), expected, name)
        assert_same(each.state_dict(), plain.state_dict(), name)
        each.load_state_dict(before)
        assert_same(each.state_dict(), before, name)


def test_what_a_pipe_offers_can_be_set():
    pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    pipe.balance = "mine"
    assert pipe.balance == compiled_of(pipe).balance == "mine"


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="'Pipe' object has no attribute 'nothing'"):
        SAMPLE.nothing  # noqa: B018
