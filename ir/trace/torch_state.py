"""Tracing runs the user's forward, which may stop anywhere. Afterwards torch's own state in this thread is what it was before.

left behind by a forward that stops                  put back by
───────────────────────────────────────────────────────────────────────────────────────────
levels of torch.func (vmap, grad, jvp)               leaving them, innermost first
modes for functions and for operations               the same
hooks for saved tensors, levels of forward_ad        the same
autocast, gradient mode, default dtype, settings     setting them
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from pippy.ir.base.surroundings import SETTINGS

_C: Any = torch._C


@contextmanager
def leaving_torch_as_it_was() -> Iterator[None]:
    """A context after which torch's state in this thread is that of before."""
    depths = [depth() for depth, _ in _STACKS]
    settings = [row.read() for row in SETTINGS]
    grad, autocast = torch.is_grad_enabled(), _autocast()
    try:
        yield
    finally:
        for (depth, leave), before in zip(_STACKS, depths):
            for _ in range(depth() - before):
                leave()
        for row, value in zip(SETTINGS, settings):
            if row.read() != value:
                row.write(value)
        torch.set_grad_enabled(grad)
        if _autocast() != autocast:
            _set_autocast(*autocast)


def _depth_of_saved_tensors_hooks() -> int:
    """How many pairs of hooks for saved tensors there are. torch says only which is the innermost."""
    hooks, taken = _C._autograd, list[Any]()
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(top)
        hooks._pop_saved_tensors_default_hooks()
    for pair in reversed(taken):
        hooks._push_saved_tensors_default_hooks(*pair)
    return len(taken)


def _depth_of_autocast() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _leave_autocast() -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()


_STACKS = (
    (
        _C._functorch.get_dynamic_layer_stack_depth,
        lambda: _C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(
            _C._functorch.get_dynamic_layer_stack_depth() - 1
        ),
    ),
    (_C._len_torch_function_stack, _C._pop_torch_function_stack),
    (_C._len_torch_dispatch_stack, _C._pop_torch_dispatch_stack),
    (lambda: forward_ad._current_level + 1, forward_ad.exit_dual_level),
    (_depth_of_saved_tensors_hooks, _C._autograd._pop_saved_tensors_default_hooks),
    (_depth_of_autocast, _leave_autocast),
)


def _autocast() -> tuple[Any, ...]:
    kinds = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _C._autocast_supported_devices()
    ]
    return torch.is_autocast_cache_enabled(), kinds


def _set_autocast(keeps: bool, kinds: list[tuple[str, bool, torch.dtype]]) -> None:
    torch.set_autocast_cache_enabled(keeps)
    for kind, enabled, dtype in kinds:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
