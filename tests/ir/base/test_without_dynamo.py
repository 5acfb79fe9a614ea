"""Optimizers work without torch._dynamo as they do with it, and are torch's own as soon as it is there."""

from tests.test_imports import python

# Trains with each optimizer of torch, and with a class that inherits from one; the closure calls zero_grad.
OPTIMIZERS = """
import inspect, sys, torch
from torch import nn
from torch.optim import Optimizer
from pippy.ir.base.without_dynamo import optimizers_import_no_dynamo

class Halving(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] /= 2
        return loss

KINDS = [each for each in vars(torch.optim).values() if inspect.isclass(each) and issubclass(each, Optimizer)]
KINDS = [each for each in KINDS if each is not Optimizer] + [Halving]

def trained(kind):
    torch.manual_seed(0)
    sparse = kind is torch.optim.SparseAdam
    model = nn.Embedding(4, 4, sparse=True) if sparse else nn.Linear(4, 4, bias=False)
    x = torch.tensor([1, 2]) if sparse else torch.randn(4, 4, dtype=torch.float64)
    optimizer, modes = kind(model.double().parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    optimizer.register_step_post_hook(lambda *_: modes.append(torch.is_grad_enabled()))

    def closure():
        modes.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        modes.append(optimizer.step(closure).requires_grad)
        optimizer.load_state_dict(optimizer.state_dict())
    return model.weight.detach(), modes, torch.is_grad_enabled()

def all_trained():
    return [trained(each) for each in KINDS]
"""
WITHOUT = """
optimizers_import_no_dynamo()
without = all_trained()
assert "torch._dynamo" not in sys.modules
import torch._dynamo
with_it = all_trained()
for kind, (one, *modes), (other, *others) in zip(KINDS, without, with_it, strict=True):
    assert torch.equal(one, other) and modes == others and modes[0], kind
assert Optimizer.zero_grad.__wrapped__.__dynamo_disable._torchdynamo_disable, "it is kept from being compiled"
print(len(KINDS), *(each.double().sum().item().hex() for each, *_ in without))
"""
TORCHS = """
print(len(KINDS), *(each.double().sum().item().hex() for each, *_ in all_trained()))
assert "torch._dynamo" in sys.modules
"""


def test_optimizers_compute_the_same_without_dynamo_with_it_and_where_nothing_was_changed():
    told = python(OPTIMIZERS + WITHOUT)
    assert int(told.split()[0]) > 10
    assert told == python(OPTIMIZERS + TORCHS)


# Graphs of a backend that counts their nodes: what is compiled after a change is what is compiled without.
COMPILED = """
import sys, torch
from torch import nn
from pippy.ir.base.without_dynamo import import_no_dynamo, optimizers_import_no_dynamo
from torch.utils.checkpoint import checkpoint

if sys.argv[1:]:
    optimizers_import_no_dynamo()
    import_no_dynamo(checkpoint)
torch.manual_seed(0)
model, x, graphs = nn.Linear(4, 4), torch.randn(4, 4), []
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
assert ("torch._dynamo" in sys.modules) == (not sys.argv[1:])

def counted(module, inputs):
    graphs.append(len(module.graph.nodes))
    return module

def train(x):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss

def add():
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

def checkpointed(x):
    return checkpoint(lambda y: model(y).tanh(), x, use_reentrant=False).sum()

compiled = torch.compile(train, backend=counted)
losses = [compiled(x).item() for _ in range(2)]
torch.compile(checkpointed, backend=counted, fullgraph=True)(x).backward()
torch.compile(add, backend=counted)()
print(losses, graphs)
"""


def test_torch_compiles_them_as_ever():
    assert python(COMPILED, "without") == python(COMPILED)
