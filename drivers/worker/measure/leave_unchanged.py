"""Runs modules and leaves what they change as it was: random states, buffers and attributes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

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
    function = module.function if isinstance(module, FunctionLoss) else module
    reached = list(_reached(function))
    modules = [each for root in [module, *reached] if isinstance(root, nn.Module) for each in root.modules()]
    plain = [each for each in reached if isinstance(each, torch.Tensor) and not each.requires_grad]
    scripted = [
        each for each in modules if isinstance(each, torch.jit.ScriptModule)
    ]  # their attributes are not in Python
    modules = [each for each in modules if not isinstance(each, torch.jit.ScriptModule)]
    attributes = [(each, dict(each.__dict__), dict(each._buffers)) for each in modules]
    held = [*plain, *(buffer for each in scripted for buffer in each.buffers(recurse=False))]
    held += [*(buffer for _, _, buffers in attributes for buffer in buffers.values() if buffer is not None)]
    numbered = dict(enumerate(held))
    before = Snapshot(numbered, copied=numbered)
    try:
        with untouched_random_state() if random else nullcontext():
            yield
    finally:
        for each, attribute, buffers in attributes:
            each.__dict__.clear()
            each.__dict__.update(attribute)
            each._buffers.clear()
            each._buffers.update(buffers)
        before.restore()


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
