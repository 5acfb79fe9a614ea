"""Warns when the state dict of a model of this process is read, and a driver has updated only its copies on the workers.

The first update after the workers and this process had the same places a hook on each module of the model; the next
`driver.copy_to(model)` takes it away again.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pippy.ir import source
from pippy.ir.pipe import Pipe, modules_of_model


class StaleModels:
    """The modules of this process whose parameters are older than those that one driver has on the workers."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = weakref.ref(pipe)  # an optimizer has this object, and may outlive the Pipe
        self._handles: list[RemovableHandle] = []
        self._warned = False
        weakref.finalize(self, _remove, self._handles).atexit = False

    def updated(self) -> None:
        """An optimizer has updated the parameters on the workers."""
        self._warned, pipe = False, self._pipe()
        if self._handles or pipe is None:
            return
        hook: Any = _Hook(self)
        for module in modules_of_model(pipe):
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_state_dict_pre_hook(hook))

    def end(self) -> None:
        """The model in this process is as it is on the workers, or nobody can copy it any more."""
        _remove(self._handles)

    def warn_once(self) -> None:
        """Warn the user whose line reads a state dict, if that was not done since the latest update."""
        if self._warned or source.is_called_by_pippy():
            return
        self._warned = True
        source.warn(
            "this state_dict() is not what was trained: the driver updates its copies of the parameters on the workers, and "
            "the model in this process is as it was; call driver.copy_to(model) first, while the cluster is open, or take "
            "driver.state_dict()"
        )


class _Hook:
    """What a module calls before its state dict is read. A copied or pickled one does nothing."""

    def __init__(self, stale: StaleModels) -> None:
        self._stale = weakref.ref(stale)

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        stale = self._stale()
        if stale is not None:
            stale.warn_once()

    def __reduce__(self) -> Any:
        return getattr, ("", "format")  # it takes any arguments, and a process without pippy has it


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
