"""`torch.utils.checkpoint` in forward was traced through: the backward kept all that it is meant to free."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from pippy import Pipe, PipeTracer, pipe_split, pipeline
from pippy.ir.errors import TracingError
from pippy.ir.run.stage_run import run_stage


class Block(nn.Module):
    """Layers that keep much, and a call of them that keeps their input alone."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


class Checkpoints(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.block = nn.Linear(64, 64), Block(reentrant)

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.block(x)


class InSequence(Checkpoints):
    def forward(self, x):
        pipe_split()
        return checkpoint_sequential(self.block.layers, 2, self.first(x), use_reentrant=self.block.reentrant)


class Whole(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Block) or super().is_leaf_module(m, module_qualified_name)


def saved_bytes(module, x):
    """The bytes that a forward keeps for its backward, without the parameters."""
    kept = {}
    parameters = {each.data_ptr() for each in module.parameters()}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes, tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run_stage("submod_1", module, (x,))
    assert output.requires_grad
    return sum(nbytes for nbytes, _ in kept.values())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("kind", "line"), [(Checkpoints, "return checkpoint("), (InSequence, "checkpoint_sequential(")]
)
def test_it_is_refused_with_the_line(kind, line, reentrant):
    with pytest.raises(TracingError, match="a traced graph would lose it") as caught:
        pipeline(kind(reentrant))
    assert line in str(caught.value)


def test_the_line_is_named_after_torch_compile_too():
    """From its first use on, torch.compile runs `Tracer.trace` and `checkpoint` in one and the same function of its own."""
    torch.compile(torch.neg, backend="eager")(torch.ones(2))
    with pytest.raises(TracingError) as caught:
        pipeline(Checkpoints(True))
    assert "return checkpoint(" in str(caught.value)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_remedies_keep_little_and_give_the_same_gradients(reentrant):
    torch.manual_seed(0)
    model, x, target = Checkpoints(reentrant), torch.randn(256, 64), torch.randn(256, 64)
    plain = copy.deepcopy(model)
    nn.functional.mse_loss(plain(x), target).backward()
    sequential = Pipe.from_sequential(copy.deepcopy(nn.Sequential(model.first, model.block)), nn.MSELoss())
    for pipe in (sequential, pipeline(model, nn.MSELoss(), tracer=Whole)):
        stage = dict(pipe.stages())["submod_1"]
        assert saved_bytes(stage, x.clone().requires_grad_()) <= x.nbytes
        pipe(x, target)
        for own, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad, theirs.grad)
            own.grad = None
