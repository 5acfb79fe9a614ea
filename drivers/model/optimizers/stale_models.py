"""Warns when a model of this process is called, or its state dict is read, and a driver has updated only copies on the workers.

At the first update that makes the model of this process older than the workers', each module gets a hook for its state dict,
and another function for `model(x)` to call. The next `driver.copy_to(model)` removes both. A forward hook cannot replace the
function: torch has other kernels for layers with hooks, and hooks are pickled.

In a callback of a training loop the model is copied instead, when the callback reads its numbers: then every function of torch
is looked at, which would be too much for a whole script.
"""

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from pippy.ir.base import source
from pippy.ir.base.surroundings import OwnFunctionMode
from pippy.ir.base.trees import tensors
from pippy.ir.pipe import Pipe, models_of, modules_of_model


class StaleModels:
    """The modules of this process whose parameters are older than those that one driver has on the workers."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = weakref.ref(pipe)  # an optimizer has this object, and may outlive the Pipe
        self._handles: list[RemovableHandle | _Call] = []
        self._warned = set[str]()
        self._parameters: list[tuple[weakref.ref[torch.Tensor], int]] = []
        weakref.finalize(self, _remove, self._handles).atexit = False

    @property
    def is_current(self) -> bool:
        """Whether no update has made the model of this process older than the workers'."""
        return not self._handles

    def updated(self) -> None:
        """An optimizer has updated the parameters on the workers."""
        self._warned, pipe = set(), self._pipe()
        if self._handles or pipe is None:
            return
        hook: Any = _Hook(self)
        for module in modules_of_model(pipe):
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_state_dict_pre_hook(hook))
        everything = {id(each): each for model in models_of(pipe) for each in model.parameters()}
        self._parameters = [(weakref.ref(each), each._version) for each in everything.values()]
        for model in models_of(pipe):
            if getattr(model, _CALLED, self) is None and not isinstance(model, torch.jit.ScriptModule):
                self._handles.append(_Call(model, self))

    def end(self) -> None:
        """Stop warning: the model in this process is as on the workers, or it can no longer be copied from there."""
        _remove(self._handles)

    def warn_once(self, what: str, instead: str) -> None:
        """Warn at the user's line that does ``what``, once after each update; or copy the model, in a callback."""
        stack = _get_current_function_mode_stack()
        modes = [each for each in stack if isinstance(each, CopiedWhenRead) and each.stale is self]
        for mode in modes[: not self.is_current]:
            mode.copy()
        if modes or what in self._warned or source.is_called_by_pippy():
            return
        self._warned.add(what)
        source.warn(
            f"this {what} does not use the trained parameters: the driver trains copies on the workers, and does "
            "not change the model in this process; call driver.copy_to(model) first, while the cluster is open, or "
            f"{instead}"
        )

    def has_changed(self) -> bool:
        """Whether the model of this process was changed: the user may have loaded the trained parameters."""
        pairs = [(reference(), version) for reference, version in self._parameters]
        return any(each is None or each._version != version for each, version in pairs)


# What a function of torch asks of a tensor without a look at its numbers: properties and functions, by their names.
_NO_NUMBERS = frozenset(
    "shape dtype device layout ndim nbytes requires_grad requires_grad_ grad grad_fn is_leaf is_meta is_cpu is_cuda is_sparse "
    "_version size dim numel nelement stride storage_offset element_size is_floating_point is_complex is_contiguous get_device "
    "is_inference data_ptr register_hook __len__ __hash__".split()
)


class CopiedWhenRead(OwnFunctionMode):
    """A context for a callback of a training loop. Before a function of torch reads numbers of a model that is older than the
    workers', ``copy`` is called."""

    def __init__(self, stale: StaleModels, model: nn.Module, copy: Callable[[], Any]) -> None:
        super().__init__()
        self.stale, self.copy, self._model = stale, copy, model

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_property = getattr(function, "__name__", "") in ("__get__", "__set__")
        name = getattr(function.__self__ if is_property else function, "__name__", "")
        reads = not self.stale.is_current and name not in _NO_NUMBERS
        if reads and any(id(each) in self._ids for each in tensors((args, kwargs))):
            self.copy()
        return function(*args, **(kwargs or {}))

    @cached_property
    def _ids(self) -> set[int]:
        return {id(each) for each in (*self._model.parameters(), *self._model.buffers()) if not each.is_meta}


class _Hook:
    """The hook that a module calls before its state dict is read. A copied or pickled hook does nothing."""

    def __init__(self, stale: StaleModels) -> None:
        self._stale = weakref.ref(stale)

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        stale = self._stale()
        if stale is not None:
            stale.warn_once("state_dict()", "take driver.state_dict()")

    def __reduce__(self) -> Any:
        return getattr, ("", "format")  # it takes any arguments, and a process without pippy has it


# What nn.Module calls in place of `_call_impl`. It is for module.compile(), and neither copied nor pickled.
_CALLED = "_compiled_call_impl"


class _Call:
    """The function that a call of a model goes through."""

    def __init__(self, model: nn.Module, stale: StaleModels) -> None:
        self._model, self._stale = weakref.ref(model), weakref.ref(stale)
        model.__dict__[_CALLED] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, stale = self._model(), self._stale()
        assert model is not None
        if stale is not None and not torch.compiler.is_compiling() and not stale.has_changed():
            stale.warn_once("call of the model", "have the workers compute it, as in driver.run(...)")
        return model._call_impl(*args, **kwargs)

    def remove(self) -> None:
        """Remove the function, unless the user has compiled the model since."""
        model = self._model()
        if model is not None and model.__dict__.get(_CALLED) is self:
            del model.__dict__[_CALLED]


def _remove(handles: "list[RemovableHandle | _Call]") -> None:
    while handles:
        handles.pop().remove()
