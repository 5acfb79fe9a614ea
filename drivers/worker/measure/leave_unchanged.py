"""Runs modules and leaves what they change as it was: random states, buffers, attributes and training flags."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pippy.drivers.protocol.state import UnreadableTensor
from pippy.ir.record.reached import is_own_code, reached_by
from pippy.ir.run.forward_state import Before
from pippy.ir.run.in_place import Snapshot
from pippy.ir.run.random_state import untouched_random_state


@contextmanager
def left_unchanged(module: nn.Module) -> Iterator[None]:
    """Leave random states, buffers and attributes as they are, those of what a loss function refers to too.

    >>> norm = nn.BatchNorm1d(2)
    >>> with left_unchanged(norm):
    ...     _ = norm(torch.randn(3, 2))
    >>> norm.num_batches_tracked
    tensor(0)
    """
    put_back = as_now([module])
    try:
        with untouched_random_state():
            yield
    finally:
        put_back()


def as_now(roots: Sequence[Any]) -> Callable[[], None]:
    """What puts back the buffers, attributes and training flags that modules, and what loss functions refer to, have now."""
    found = [each.value for root in roots for each in reached_by(root, "", kind=object)]
    modules = dict.fromkeys(each for each in found if isinstance(each, nn.Module) and _is_here(each))
    scripted = [each for each in modules if isinstance(each, torch.jit.ScriptModule)]  # with attributes not in Python
    plain = [each for each in modules if not isinstance(each, torch.jit.ScriptModule)]
    tensors = [each for each in found if type(each) is torch.Tensor and not each.requires_grad]
    tensors += [buffer for each in scripted for buffer in each.buffers()]
    numbered = dict(enumerate(tensors))
    before, others = Before(plain, None), Snapshot(numbered, copied=numbered)
    flags = [(each, each.training) for each in plain]
    objects = [(vars(each), dict(vars(each))) for each in found if _has_attributes(each)]

    def put_back() -> None:
        before.put_back()
        others.restore()
        for now, then in objects:
            now.clear()
            now.update(then)
        for each, flag in flags:
            each.training = flag

    return put_back


def _has_attributes(value: Any) -> bool:
    """Whether a value is an object of a class of the user's, such as a loss that is no module."""
    return (
        not isinstance(value, (nn.Module, torch.Tensor, type))
        and is_own_code(type(value))
        and hasattr(value, "__dict__")
    )


def _is_here(module: nn.Module) -> bool:
    """Whether this process has the buffers of a module."""
    return not any(isinstance(each, UnreadableTensor) for each in module._buffers.values())
