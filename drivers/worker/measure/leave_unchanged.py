"""Runs modules and leaves what they change as it was: random states, buffers, attributes and training flags."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from pippy.drivers.worker.state.forward_state import Before
from pippy.ir.loss.loss_function import FunctionLoss
from pippy.ir.run.random_state import untouched_random_state
from pippy.ir.run.snapshot import Snapshot


@contextmanager
def left_unchanged(module: nn.Module, random: bool = True) -> Iterator[None]:
    """Leave random states, buffers and attributes as they are, those of what a loss function refers to too.

    With ``random=False``, random states are left to others.

    >>> norm = nn.BatchNorm1d(2)
    >>> with left_unchanged(norm):
    ...     _ = norm(torch.randn(3, 2))
    >>> norm.num_batches_tracked
    tensor(0)
    """
    put_back = as_now([module])
    try:
        with untouched_random_state() if random else nullcontext():
            yield
    finally:
        put_back()


def as_now(roots: Sequence[Any]) -> Callable[[], None]:
    """What puts back the buffers, attributes and training flags that modules, and what loss functions refer to, have now."""
    functions = [each.function if isinstance(each, FunctionLoss) else each for each in roots]
    held = [*roots, *functions, *(each for function in functions for each in _reached(function))]
    modules = dict.fromkeys(each for root in held if isinstance(root, nn.Module) for each in root.modules())
    scripted = [each for each in modules if isinstance(each, torch.jit.ScriptModule)]  # with attributes not in Python
    plain = [each for each in modules if not isinstance(each, torch.jit.ScriptModule)]
    tensors = [each for each in held if isinstance(each, torch.Tensor) and not each.requires_grad]
    tensors += [buffer for each in scripted for buffer in each.buffers(recurse=False)]
    numbered = dict(enumerate(tensors))
    before, others = Before(plain, None), Snapshot(numbered, copied=numbered)
    flags = [(each, each.training) for each in plain]

    def put_back() -> None:
        before.put_back()
        others.restore()
        for each, flag in flags:
            each.training = flag

    return put_back


def _reached(function: Any) -> Iterator[Any]:
    """What a function refers to by its closure, its arguments or its object."""
    if hasattr(function, "func"):  # a partial
        yield from _reached(function.func)
        yield from [*function.args, *function.keywords.values()]
    yield getattr(function, "__self__", None)
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents
    code = getattr(function, "__code__", None)
    names = code.co_names if code is not None else ()
    yield from (function.__globals__[name] for name in names if name in function.__globals__)
