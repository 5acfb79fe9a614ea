"""I and W together are the whole backward: the same gradients to the bit, for the inputs and for the parameters."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from pippy.drivers.worker.halves.split_backward import WeightDeferral
from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import children, leaves, map_tensors
from pippy.ir.run.stage_backward import SEED, stage_backward
from pippy.ir.run.stage_run import as_leaf


class Call(nn.Module):
    """A module whose forward is a function of itself; `wide` makes it easy to say which layers it has."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Scaled(torch.autograd.Function):
    """Both gradients by hand, each only where it is needed."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Scaled.runs += 1
        x, weight = ctx.saved_tensors
        of_x = grad * weight if ctx.needs_input_grad[0] else None
        of_weight = (grad * x).sum((0, 1)) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight)


@dataclass
class Pair:
    one: torch.Tensor
    two: Any


def lin(*, bias: bool = True, sizes: tuple[int, int] = (4, 4)) -> nn.Linear:
    return nn.Linear(*sizes, bias=bias)


def tied(one: nn.Module, two: nn.Module) -> dict[str, nn.Module]:
    one.weight = two.weight
    return {"a": one, "b": two}


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def x3() -> torch.Tensor:
    return torch.randn(3, 5, 4, requires_grad=True)


def ids() -> torch.Tensor:
    return torch.randint(4, (3, 5))


def block(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + m.b(F.gelu(m.a(x)))


def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    y[0].mul_(2)
    y.relu_()
    return m.b(y).add_(1.0)


def checkpointed(reentrant: bool) -> Callable[[Any, torch.Tensor], Any]:
    return lambda m, x: checkpoint(lambda x: block(m, x), x, use_reentrant=reentrant) * 2


# what a stage may be, and what it is called with; every case is compared with the whole backward
CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "block": lambda: (Call(block, a=lin(), b=lin(bias=False)), (x3(),)),
    "2d": lambda: (Call(block, a=lin(), b=lin(bias=False)), (torch.randn(3, 4, requires_grad=True),)),
    "1d": lambda: (Call(block, a=lin(), b=lin(bias=False)), (torch.randn(4, requires_grad=True),)),
    "one row": lambda: (Call(block, a=lin(), b=lin()), (torch.randn(1, 1, 4, requires_grad=True),)),
    "no rows": lambda: (Call(block, a=lin(), b=lin()), (torch.randn(0, 2, 4, requires_grad=True),)),
    "strided": lambda: (Call(lambda m, x: block(m, x.transpose(0, 1)), a=lin(), b=lin(bias=False)), (x3(),)),
    "4d": lambda: (Call(block, a=lin(), b=lin(bias=False)), (torch.randn(2, 3, 2, 4, requires_grad=True),)),
    "off the input's path": lambda: (
        Call(lambda m, x: (m.a(x), m.b(m.c.weight), m.b.bias * 2), a=lin(), b=lin(), c=lin()),
        (x3(),),
    ),
    "no input needs a gradient": lambda: (Call(block, a=lin(), b=lin()), (torch.randn(3, 5, 4), "text")),
    "token embedding": lambda: (Call(lambda m, i: block(m, m.e(i)), a=lin(), b=lin(), e=nn.Embedding(4, 4)), (ids(),)),
    "embedding beside the input": lambda: (
        Call(lambda m, x, i: block(m, x + m.e(i)), a=lin(), b=lin(), e=nn.Embedding(4, 4)),
        (x3(), ids()),
    ),
    "sparse embedding": lambda: (
        Call(lambda m, x, i: block(m, x + m.e(i)), a=lin(), b=lin(), e=nn.Embedding(4, 4, sparse=True)),
        (x3(), ids()),
    ),
    "a sparse matrix": lambda: (
        Call(lambda m, x: m.b(m.a(x).relu().to_sparse()), a=lin(), b=lin()),
        (torch.randn(3, 4, requires_grad=True),),
    ),
    "one layer used twice": lambda: (Call(lambda m, x: block(m, block(m, block(m, x))), a=lin(), b=lin()), (x3(),)),
    "two layers, one weight": lambda: (Call(block, **tied(lin(), lin())), (x3(),)),
    "embedding and head, one weight": lambda: (
        Call(lambda m, x, i: m.b(x + m.a(i)), **tied(nn.Embedding(4, 4), lin())),
        (x3(), ids()),
    ),
    "a weight on the path and off it": lambda: (
        Call(lambda m, x: (m.a(x), m.b(m.e.weight)), e=nn.Embedding(4, 4), **tied(lin(), lin())),
        (x3(),),
    ),
    "a view": lambda: (Call(lambda m, x: (m.a(x)[0], m.b(x).transpose(0, 1)), a=lin(), b=lin()), (x3(),)),
    "several, one without gradient": lambda: (Call(lambda m, x: (m.a(x), m.b(x), None), a=lin(), b=lin()), (x3(),)),
    "the same output twice": lambda: (Call(lambda m, x: [block(m, x)] * 2, a=lin(), b=lin()), (x3(),)),
    "an input passed through": lambda: (Call(lambda m, x: (x, block(m, x)), a=lin(), b=lin()), (x3(),)),
    "integers": lambda: (Call(lambda m, x: (m.a(x), m.b(x).argmax(-1)), a=lin(), b=lin()), (x3(),)),
    "containers": lambda: (
        Call(lambda m, p: {"k": Pair(m.a(p.one), [m.b(p.two[0]), 3])}, a=lin(), b=lin()),
        (Pair(x3(), (x3(), "text")),),
    ),
    "frozen": lambda: (Call(block, a=frozen(lin()), b=lin()), (x3(),)),
    "all frozen": lambda: (Call(block, a=frozen(lin()), b=frozen(lin())), (x3(),)),
    "custom function": lambda: (Call(lambda m, x: block(m, m.s(m.b(x))), a=lin(), b=lin(), s=Scale()), (x3(),)),
    "custom function off the path": lambda: (
        Call(lambda m, x: (block(m, x), m.s(m.a.bias.expand(1, 1, 4))), a=lin(), b=lin(), s=Scale()),
        (x3(),),
    ),
    "checkpoint": lambda: (Call(checkpointed(False), a=lin(), b=lin(bias=False)), (x3(),)),
    "reentrant checkpoint": lambda: (Call(checkpointed(True), a=lin(), b=lin(bias=False)), (x3(),)),
    "in place": lambda: (Call(in_place, a=lin(), b=lin()), (x3(),)),
    "in place without bias": lambda: (Call(in_place, a=lin(bias=False), b=lin(bias=False)), (x3(),)),
    "dropout": lambda: (Call(lambda m, x: block(m, F.dropout(m.a(x))), a=lin(), b=lin()), (x3(),)),
    "lstm": lambda: (Call(lambda m, x: m.a(m.r(x)[0]), a=lin(), r=nn.LSTM(4, 4)), (x3(),)),
    "attention": lambda: (Call(lambda m, x: m.a(m.r(x, x, x)[0]), a=lin(), r=nn.MultiheadAttention(4, 2)), (x3(),)),
    "transformer layer": lambda: (nn.TransformerEncoderLayer(4, 2, 8), (x3(),)),
    "norm": lambda: (Call(lambda m, x: block(m, m.n(x)), a=lin(), b=lin(), n=nn.LayerNorm(4)), (x3(),)),
    "conv2d": lambda: (
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 2, 2, stride=2, groups=2)),
        (torch.randn(2, 4, 5, 5, requires_grad=True),),
    ),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3, bias=False, dilation=2), (torch.randn(2, 4, 9, requires_grad=True),)),
    "conv with frozen bias": lambda: (
        Call(lambda m, x: m.a(x), a=_frozen_bias(nn.Conv1d(4, 6, 3))),
        (torch.randn(2, 4, 9, requires_grad=True),),
    ),
    "conv unbatched": lambda: (nn.Conv1d(4, 6, 3), (torch.randn(4, 9, requires_grad=True),)),
    "conv reflected": lambda: (
        nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect"),
        (torch.randn(2, 4, 9, requires_grad=True),),
    ),
    "mixed types": lambda: (
        Call(lambda m, x: m.b(m.a(x.float()).double()), a=lin().float(), b=lin()),
        (x3(),),
    ),
    "autocast": lambda: (Call(_under_autocast, a=lin().float(), b=lin().float()), (x3(),)),
    "no autocast": lambda: (Call(_without_autocast, a=lin(), b=lin()), (x3(),)),
    "nothing reaches the parameters": lambda: (Call(lambda m, x: x * 2, a=lin(), b=lin()), (x3(),)),
    "one layer unused": lambda: (Call(lambda m, x: (m.b(x), m.a(x))[1], a=lin(), b=lin()), (x3(),)),
    "loss": lambda: (Call(lambda m, x: block(m, x).square().mean(), a=lin(), b=lin()), (x3(),)),
}


def _frozen_bias(module: Any) -> nn.Module:
    module.bias.requires_grad_(False)
    return module


def _under_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return block(m, x.float()).double()


def _without_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return block(m, x)


def run(
    stage: nn.Module, args: tuple[Any, ...], split: bool, times: int = 1, skip: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    """The gradients of the inputs of each run, and of the parameters after all."""
    deferral = WeightDeferral(stage, at_least=0)
    grads: list[Any] = []
    for seed in range(times):
        inputs = as_leaf(args)
        torch.manual_seed(seed)
        with deferral.recording(inputs if split else []) as deferred:
            output = stage(*inputs) if not isinstance(inputs[-1], str) else stage(*inputs[:-1])
        output_grads = _random_grads(output, skip)
        if split:
            grads += deferred.backward_input(output, output_grads, inputs)
            deferred.run()
            assert len(deferred) == 0
        else:
            grads += stage_backward(output, output_grads, inputs)
    return list(leaves(grads)), {name: parameter.grad for name, parameter in stage.named_parameters()}


def _random_grads(output: Any, skip: int) -> Any:
    """A gradient for each tensor, but for those whose bit is set in ``skip``; `SEED` for a loss."""
    if isinstance(output, torch.Tensor):
        return SEED if output.dim() == 0 else torch.randn(output.shape).to(output.dtype)
    held = children(output)
    if held is None:
        return None
    return tuple(None if skip >> i & 1 else _random_grads(item, 0) for i, item in enumerate(held))


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        assert one.layout == other.layout
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.layout != torch.strided or one.stride() == other.stride()
    else:
        assert one is other is None


@pytest.fixture(autouse=True)
def _doubles() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def both(case: str, **options: Any) -> None:
    stage, args = CASES[case]()
    twin = copy.deepcopy(stage)
    whole, halves = run(stage, args, split=False, **options), run(twin, args, split=True, **options)
    for one, other in zip(whole[0], halves[0], strict=True):
        assert_same(one, other)
    assert whole[1].keys() == halves[1].keys()
    for name in whole[1]:
        assert_same(whole[1][name], halves[1][name])


@pytest.mark.parametrize("case", CASES)
def test_the_halves_are_the_whole(case: str) -> None:
    both(case)


@pytest.mark.parametrize("case", CASES)
def test_gradients_add_up_over_runs(case: str) -> None:
    both(case, times=3)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.integers(0, 7), st.integers(1, 2))
def test_whatever_outputs_have_a_gradient(case: str, skip: int, times: int) -> None:
    both(case, skip=skip, times=times)


@pytest.mark.parametrize("case", ["block", "strided", "conv2d", "one layer used twice"])
def test_in_single_precision_the_bits_are_the_same_too(case: str) -> None:
    torch.set_default_dtype(torch.float32)
    both(case, times=2)


@pytest.mark.parametrize("case", ["block", "strided", "conv2d", "one layer used twice", "checkpoint", "no autocast"])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_under_autocast_the_bits_are_the_same_too(case: str, precision: torch.dtype) -> None:
    torch.set_default_dtype(precision)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both(case, times=2)


@pytest.mark.parametrize("case", ["block", "conv2d", "checkpoint"])
def test_heavy_weights_wait_under_autocast(case: str) -> None:
    """All gradients were computed in I, so a zero-bubble schedule had nothing for W."""
    torch.set_default_dtype(torch.float32)
    stage, args = CASES[case]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, deferred = split_once(stage, *args)
        assert len(deferred) == 2
        deferred.run()
        with torch.autocast("cpu", cache_enabled=False):
            assert not len(split_once(stage, *args)[1])


def split_once(stage: nn.Module, *inputs: Any) -> tuple[Any, Any]:
    deferral = WeightDeferral(stage, at_least=0)
    with deferral.recording(inputs) as deferred:
        output = stage(*inputs)
    deferred.backward_input(output, map_tensors(torch.ones_like, output), inputs)
    return output, deferred


@pytest.mark.parametrize("case, waiting", [("block", 2), ("conv2d", 2), ("checkpoint", 2), ("reentrant checkpoint", 2)])
def test_heavy_weights_wait(case: str, waiting: int) -> None:
    stage, args = CASES[case]()
    _, deferred = split_once(stage, *args)
    assert len(deferred) == waiting
    weights = [parameter for name, parameter in stage.named_parameters() if "weight" in name]
    assert all(weight.grad is None for weight in weights)
    deferred.run()
    assert all(weight.grad is not None for weight in weights)


def test_a_stage_without_inputs_that_need_a_gradient_does_all_in_w() -> None:
    stage, args = CASES["no input needs a gradient"]()
    deferral = WeightDeferral(stage, at_least=0)
    with deferral.recording(args) as deferred:
        output = stage(args[0])
    assert deferred.backward_input(output, torch.ones_like(output), args) == (None, None)
    assert all(parameter.grad is None for parameter in stage.parameters())
    deferred.run()
    assert all(parameter.grad is not None for parameter in stage.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_runs_once_more(reentrant: bool) -> None:
    runs = []

    def inner(m: Any, x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return block(m, x)

    def counted(m: Any, x: torch.Tensor) -> Any:
        return checkpoint(lambda x: inner(m, x), x, use_reentrant=reentrant)

    _, deferred = split_once(Call(counted, a=lin(), b=lin()), x3())
    deferred.run()
    assert len(runs) == 2


def test_a_custom_function_runs_once() -> None:
    Scaled.runs = 0
    stage, args = CASES["custom function"]()
    _, deferred = split_once(stage, *args)
    deferred.run()
    assert Scaled.runs == 1


@pytest.mark.parametrize("times", [1, 2])
def test_hooks_see_the_whole_gradient_once(times: int) -> None:
    def used(m: Any, x: torch.Tensor) -> Any:
        for _ in range(times):
            x = block(m, x)
        return x * m.a.weight.sum()

    stage: Any = Call(used, a=lin(), b=lin())
    twin, x = copy.deepcopy(stage), x3()
    seen: dict[str, list[Any]] = {"whole": [], "halves": []}
    for name, model in ("whole", stage), ("halves", twin):
        model.a.weight.register_hook(lambda grad, name=name: seen[name].append(grad.clone()))
        model.b.weight.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.clone()))
    stage_backward(output := stage(x), torch.ones_like(output), [x])
    split_once(twin, x.detach().requires_grad_())[1].run()
    assert len(seen["whole"]) == len(seen["halves"]) == 2
    for one, other in zip(seen["whole"], seen["halves"]):
        assert_same(one, other)


def test_a_hook_of_the_accumulating_node_runs_once() -> None:
    stage: Any = Call(block, a=lin(), b=lin())
    seen: list[int] = []
    node = stage.a.weight.view_as(stage.a.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(1))
    _, deferred = split_once(stage, x3())
    assert not seen
    deferred.run()
    assert seen == [1]


def test_a_hidden_second_use_is_right_to_rounding() -> None:
    stage: Any = Call(lambda m, x: F.linear(m.a(x), m.a.weight.t()), a=lin())
    twin, x = copy.deepcopy(stage), x3()
    stage_backward(output := stage(x), torch.ones_like(output), [x])
    split_once(twin, x.detach().requires_grad_())[1].run()
    torch.testing.assert_close(stage.a.weight.grad, twin.a.weight.grad)


def test_a_changed_input_is_refused_as_ever() -> None:
    def changes(m: Any, x: torch.Tensor) -> Any:
        h = x * 1
        return m.a(h) + h.mul_(2)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        split_once(Call(changes, a=lin()), x3())


def test_memory_is_let_go() -> None:
    kept: list[Any] = []

    def watched(m: Any, x: torch.Tensor) -> Any:
        h = torch.sin(x)  # saves x * 1, not h: only the layer needs h
        e = torch.exp(m.a(h))  # saves e: only the first half needs it
        kept.extend([weakref.ref(h.untyped_storage()), weakref.ref(e.untyped_storage())])
        return e.sum()

    stage, x = Call(watched, a=lin()), x3()
    gc.disable()
    try:
        output, deferred = split_once(stage, x)
        del output
        assert [ref() is not None for ref in kept] == [True, False]
        deferred.run()
        assert [ref() is not None for ref in kept] == [False, False]
    finally:
        gc.enable()


def test_layers_are_left_as_they_were() -> None:
    stage = Call(block, a=lin(), b=lin())
    deferral = WeightDeferral(stage, at_least=0)
    with pytest.raises(ZeroDivisionError), deferral.recording([x3()]):
        assert "forward" in stage.a.__dict__
        raise ZeroDivisionError
    assert "forward" not in stage.a.__dict__
    with pytest.raises(RuntimeError):
        split_once(stage, torch.randn(3, 7, requires_grad=True))
    assert "forward" not in stage.a.__dict__


def test_halves_out_of_order_are_refused() -> None:
    x, stage = x3(), Call(block, a=lin(), b=lin())
    with WeightDeferral(stage, at_least=0).recording([x]) as deferred:
        output = stage(x)
    with pytest.raises(StageError, match="was called before backward_input"):
        deferred.run()
    deferred.backward_input(output, torch.ones_like(output), [x])
    with pytest.raises(StageError, match="called twice"):
        deferred.backward_input(output, torch.ones_like(output), [x])
    deferred.run()
    with pytest.raises(StageError, match="a second time"):
        deferred.run()


def test_many_runs_may_wait_at_once() -> None:
    stage = Call(block, a=lin(), b=lin())
    twin, inputs = copy.deepcopy(stage), [x3() for _ in range(3)]
    for x in inputs:
        stage_backward(output := stage(x), torch.ones_like(output), [x])
    for deferred in [split_once(twin, x.detach().requires_grad_())[1] for x in inputs]:
        deferred.run()
    for one, other in zip(stage.parameters(), twin.parameters()):
        assert_same(one.grad, other.grad)


def test_everything_is_freed_with_a_run_that_is_abandoned() -> None:
    stage: Any = Call(block, a=lin(), b=lin())
    x = x3()
    storage = weakref.ref(x.untyped_storage())
    output, deferred = split_once(stage, x)
    del x, output
    assert storage() is not None
    del deferred
    assert storage() is None
    assert stage.a.weight.grad is None


def test_small_layers_are_not_worth_it() -> None:
    stage, x = Call(block, a=lin(sizes=(4, 256)), b=lin(sizes=(256, 4))), torch.randn(2048, 4, requires_grad=True)
    for rows, waiting in (2047, 0), (2048, 2):
        with WeightDeferral(stage).recording([x]) as deferred:
            output = stage(x[:rows].detach().requires_grad_())
        deferred.backward_input(output, torch.ones_like(output), [x])
        assert len(deferred) == waiting
