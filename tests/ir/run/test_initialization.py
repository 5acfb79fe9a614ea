"""Modules that make their parameters themselves, each in the same way whatever else is there."""

import copy
from hashlib import blake2b

import pytest
import torch
from torch import nn

from pippy.drivers.worker.state.initialization import initialize
from pippy.ir.base.errors import InitializationError
from pippy.ir.base.names import named_state


def on_meta(make):
    with torch.device("meta"):
        return make()


def initialized(make, only=None, function=None, seed=0, mirror=None):
    """The tensors of a model that were initialized, with the others on the meta device, and those that nothing has written."""
    model = on_meta(make)
    mirror = {} if mirror is None else mirror
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                full = next((n for n, t in named_state(model) if t is tensor), None)
                if tensor is not None and tensor.is_meta and (only is None or full in only):
                    real = torch.empty_like(tensor, device="cpu")
                    mirror[id(tensor)] = mirror.get(
                        id(tensor), nn.Parameter(real) if held is module._parameters else real
                    )
                    held[name] = mirror[id(tensor)]
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_state(model):
        if not tensor.is_meta:
            tensors.setdefault(id(tensor), (name, tensor))
    named = dict(tensors.values())
    return named, initialize(model, named, seed, function)


class Several(nn.Module):
    """Modules whose functions write several tensors, those of other modules among them, and draw into temporary ones."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.recurrent = nn.LSTM(6, 5)
        self.first, self.second, self.orthogonal = nn.Linear(8, 8), nn.Linear(8, 8), Orthogonal(8, 8)

    def reset_parameters(self):
        self.first.weight.data.normal_()
        nn.init.trunc_normal_(self.second.weight)


class Orthogonal(nn.Linear):
    def reset_parameters(self):
        super().reset_parameters()
        nn.init.orthogonal_(self.weight)


class OrthogonalParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def reset_parameters(self):
        nn.init.orthogonal_(self.first.weight)
        nn.init.orthogonal_(self.second.weight)


def test_a_tensor_is_the_same_whatever_else_is_there():
    every, unwritten = initialized(Several)
    assert unwritten == []
    assert all(tensor.isfinite().all() for tensor in every.values())
    for name, tensor in every.items():
        only = {"orthogonal.weight", "orthogonal.bias"} if "orthogonal" in name else {name}
        alone, unwritten = initialized(Several, only)
        assert (set(alone), unwritten) == (only, [])
        assert torch.equal(alone[name], tensor), name
    again, _ = initialized(Several, seed=1)
    assert not torch.equal(every["linear.weight"], again["linear.weight"])


def test_they_are_what_the_modules_make():
    every, _ = initialized(Several)
    expected = nn.Linear(4, 6)
    key = int.from_bytes(blake2b(b"0 tensor linear.weight 0", digest_size=7).digest(), "little")
    with torch.random.fork_rng():
        torch.manual_seed(key)
        nn.init.kaiming_uniform_(expected.weight, a=5**0.5)
    assert torch.equal(every["linear.weight"], expected.weight)
    assert torch.equal(every["norm.weight"], torch.ones(6))
    assert torch.equal(every["norm.running_var"], torch.ones(6))
    assert int(every["norm.num_batches_tracked"]) == 0
    assert torch.equal(every["attention.in_proj_bias"], torch.zeros(18))
    torch.testing.assert_close(every["orthogonal.weight"] @ every["orthogonal.weight"].T, torch.eye(8))
    assert not torch.equal(every["first.weight"], every["second.weight"])


def test_what_would_depend_on_the_split_is_refused():
    every, unwritten = initialized(OrthogonalParts)
    assert unwritten == []
    assert not torch.equal(every["first.weight"], every["second.weight"])
    with pytest.raises(
        InitializationError, match=r"initializes 'the model' draws .*Let the module that has the parameter"
    ):
        initialized(OrthogonalParts, {"second.weight"})

    def function(module):
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)

    def make():
        return nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    every, _ = initialized(make, function=function)
    alone, _ = initialized(make, {"1.weight", "1.bias"}, function=function)
    assert torch.equal(every["1.weight"], alone["1.weight"])


def test_the_function_comes_after():
    def zero_biases(module):
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    plain, _ = initialized(Several)
    every, _ = initialized(Several, function=zero_biases)
    assert torch.equal(every["linear.bias"], torch.zeros(6))
    assert torch.equal(every["linear.weight"], plain["linear.weight"])
    assert not torch.equal(plain["linear.bias"], torch.zeros(6))


def test_a_tied_parameter_is_as_the_first_module_makes_it():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embedding.weight

    tied, _ = initialized(Tied)
    untied, _ = initialized(lambda: nn.ModuleDict({"embedding": nn.Embedding(9, 4)}))
    assert list(tied) == ["embedding.weight"]
    assert tied["embedding.weight"].std() > 0.5  # normal, and not the Linear's uniform up to 0.5
    assert tied["embedding.weight"].shape == untied["embedding.weight"].shape


class Holds(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.arange(4).to(dtype), persistent=False)
        self.register_buffer("empty", torch.zeros(0))

    def reset_parameters(self):
        nn.init.ones_(self.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_what_nothing_writes_is_known(dtype):
    assert initialized(lambda: Holds(dtype))[1] == ["table"]

    def write(module):
        module.table.copy_(torch.arange(4))

    written, unwritten = initialized(lambda: Holds(dtype), function=write)
    assert unwritten == []
    assert torch.equal(written["table"], torch.arange(4).to(dtype))


def test_what_is_written_in_part_is_known():
    def write(module):
        module.table[:2] = 1.0

    assert initialized(lambda: Holds(torch.float32), function=write)[1] == ["table"]


def test_a_tensor_with_infinities_is_written():
    def write(module):
        module.table.copy_(torch.tensor([1.0, float("inf"), -float("inf"), 0.0]))

    assert initialized(lambda: Holds(torch.float32), function=write)[1] == []


def test_the_random_state_is_left_as_it_was():
    before = torch.get_rng_state()
    initialized(Several)
    assert torch.equal(torch.get_rng_state(), before)


def test_16_bits_are_drawn_in_16_bits():
    every, unwritten = initialized(lambda: copy.deepcopy(nn.Linear(64, 64)).to(torch.bfloat16))
    assert unwritten == []
    assert every["weight"].dtype is torch.bfloat16
    assert 0.06 < float(every["weight"].detach().float().std()) < 0.08  # uniform up to 1/8
