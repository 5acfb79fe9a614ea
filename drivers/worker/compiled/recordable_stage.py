"""A stage of which graphs are recorded: what it holds, and what would make a graph differ from it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from pippy.drivers.worker.compiled.backend import one_at_a_time
from pippy.ir.base.compiling import following_compiled
from pippy.ir.halves.joint import NotLowered
from pippy.ir.run.batch_norm import DeferredBatchNorm
from pippy.ir.run.forward_state import Before, Place, restore
from pippy.ir.run.may_draw import Draws, module_draws

_HOOKS = ("_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _forward_hooks_with_kwargs").split()


class RecordableStage:
    """A stage that is called with a ``template``, which its inputs fill."""

    def __init__(self, name: str, module: nn.Module, template: Any = None) -> None:
        self.name, self.module, self.template = name, module, template
        self.recorded = 0  # how often
        places: dict[int, list[Place]] = {}
        for each in module.modules():
            for held in (each._parameters, each._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append((held, key))
        self._where = list(places.values())
        self.norms = [each for each in module.modules() if isinstance(each, DeferredBatchNorm)]

    def held(self) -> list[torch.Tensor]:
        """The parameters and buffers that the stage holds now."""
        return [places[0][0][places[0][1]] for places in self._where]

    @contextmanager
    def holding(self, others: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, the stage holds other tensors."""
        before = self.held()
        try:
            self.hold(others)
            yield
        finally:
            self.hold(before)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put these tensors in the places of those that the stage holds."""
        for tensor, places in zip(tensors, self._where, strict=True):
            for held, key in places:
                held[key] = tensor

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, graphs are recorded. Raises if that changes the stage, which is then as before."""
        self.recorded += 1
        before = Before(list(self.module.modules()), set())
        try:
            with one_at_a_time, following_compiled(), _without_what_counts_memory():
                yield
        finally:
            changes, written, _ = before.changes()
            restore(changes)
        if changes or written:
            raise NotLowered(f"changes its attribute {changes[0].name}")

    def check(self) -> None:
        """Raise if graphs could differ from it."""
        for path, module in self.module.named_modules():
            if getattr(module.forward, "_torchdynamo_disable", False):
                raise NotLowered(f"has {path or 'itself'} marked by torch.compiler.disable")
            if any(getattr(module, each, None) for each in _HOOKS):
                raise NotLowered(f"has hooks on {path or 'itself'}, which a graph would not run")
        if module_draws(self.module) is Draws.PYTHONS_TOO:
            raise NotLowered("may draw from the generators of Python or numpy")
        if any(not is_plain(each) for each in self.held()):
            raise NotLowered("holds tensors of classes of their own")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a graph can have a tensor: it is of no class of its own, and dense.

    >>> is_plain(nn.Parameter(torch.ones(2))), is_plain(torch.ones(2).to_sparse())
    (True, False)
    """
    return type(tensor) in (torch.Tensor, nn.Parameter, FakeTensor) and tensor.layout is torch.strided


@contextmanager
def _without_what_counts_memory() -> Iterator[None]:
    """Inside, torch's modes and the hooks of saved tensors are off."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with _disable_current_modes():
            yield
    finally:
        if hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
