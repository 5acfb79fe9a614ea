"""What a script does with the model of its own process while a driver trains copies of it on the workers.

Calls and state dicts. The script is warned when the model is called, or its state dict is read, and is older than the
workers'. At the first update that makes it older, each module gets a hook for its state dict, and another function for
`model(x)` to call. The next `driver.copy_to(model)` removes both. A forward hook cannot replace the function: torch has other
kernels for layers with hooks, and hooks are pickled. In a callback of a training loop the model is copied instead, when the
callback reads its numbers: then every function of torch is looked at, which would be too much for a whole script.

Gradients. Whoever asks for `.grad` of a parameter whose gradient a driver has on its workers, or sets it, gets an error that
says what to call instead: an optimizer of this process, or `torch.nn.utils.clip_grad_norm_`, would take None for no gradient,
and do nothing. While a driver is there, the attribute is a property of `nn.Parameter`. Torch's own questions are answered as
before, as those of ``model.to``; so is everyone once the script has gradients of its own.
"""

import sys
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from pippy.drivers.base.errors import DriverError, OptimizerError
from pippy.drivers.session.driver_commands import DriverCommands
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


# Gradients of parameters of this process.


_OF_TENSOR: Any = torch.Tensor.grad
_COPY = "The driver trains copies of the parameters on the workers"
_INSTEAD = {
    "clip_grad_norm_": "call driver.clip_grad_norm_(max_norm)",
    "clip_grad_value_": "call driver.clip_grad_value_(clip_value)",
    "zero_grad": "call driver.zero_grad()",
    "unscale_": "take the scaler that driver.instantiate_grad_scaler() gives",
}
_OTHERWISE = "call driver.gradients() or driver.get_grad(name)"

_drivers: "weakref.WeakSet[DriverCommands]" = weakref.WeakSet()
_held: Any = WeakIdKeyDictionary()  # from a parameter of this process to the `_Held` of each driver


class _Held:
    """The gradient of one parameter, which a driver may have: the driver's name for it, and the model's other parameters."""

    def __init__(self, commands: DriverCommands, name: str, parameters: list["weakref.ref[torch.Tensor]"]) -> None:
        self._commands, self.name, self._parameters = weakref.ref(commands), name, parameters

    @property
    def is_there(self) -> bool:
        """Whether the workers have it, and this process has no gradient of the model."""
        commands = self._commands()
        return (
            commands is not None and commands.has_gradient(self.name) and not any(map(_has_gradient, self._parameters))
        )


def _has_gradient(reference: "weakref.ref[torch.Tensor]") -> bool:
    parameter = reference()
    return parameter is not None and gradient_here(parameter) is not None


def gradient_here(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that a parameter has in this process."""
    gradient: torch.Tensor | None = _OF_TENSOR.__get__(parameter)
    return gradient


def watch_gradients(parameters: Mapping[str, nn.Parameter], commands: DriverCommands) -> None:
    """From now on, a driver may have the gradients of these parameters of this process."""
    if "grad" not in vars(nn.Parameter):
        nn.Parameter.grad = property(_get, _set, _delete)  # type: ignore[assignment]
    _drivers.add(commands)
    weakref.finalize(commands, _remove_after_last).atexit = False
    references: list[weakref.ref[torch.Tensor]] = [weakref.ref(each) for each in parameters.values()]
    for name, each in parameters.items():
        _held.setdefault(each, []).append(_Held(commands, name, references))


def _remove_after_last() -> None:
    if not [*_drivers] and "grad" in vars(nn.Parameter):
        del nn.Parameter.grad


def _get(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = gradient_here(parameter)
    if gradient is None and parameter in _held:
        _check(parameter)
    return gradient


def _set(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if parameter in _held:
        _check(parameter)
    _OF_TENSOR.__set__(parameter, gradient)


def _delete(parameter: torch.Tensor) -> None:
    _OF_TENSOR.__delete__(parameter)


def _check(parameter: torch.Tensor) -> None:
    """Raise if workers have the gradient of a parameter, and it is the script that asks."""
    held = next((each for each in _held[parameter] if each.is_there), None) if parameter.requires_grad else None
    if held is None or source.is_called_by_pippy():
        return
    calls = _calls(sys._getframe(2))
    optimizer = next((each for each in map(_optimizer_that_steps, calls) if each is not None), None)
    if optimizer is not None:
        raise OptimizerError(
            f"this {optimizer} can update nothing: its parameters are those of this process, which have no gradients. "
            f"{_COPY}: make the optimizer with driver.instantiate_optimizer(torch.optim.{optimizer}, ...), and call "
            "driver.copy_to(model) to get the trained parameters"
        )
    called = next((each.f_code.co_name for each in calls if each.f_code.co_name in _INSTEAD), None)
    if called or source.is_users(calls[0].f_code.co_filename):
        raise DriverError(
            f"{called + '()' if called else 'the script'} asks for .grad of {held.name!r} in this process, where it is None. "
            f"{_COPY}, and their gradients are there: {_INSTEAD.get(called or '', _OTHERWISE)} in place of it. For "
            "gradients of a plain run in this process, take a copy of the model, made by copy.deepcopy(model)"
        )


def _calls(frame: FrameType | None) -> list[FrameType]:
    """The calls within torch, innermost first, and the one of the script that called torch."""
    calls: list[FrameType] = []
    while frame is not None and not (calls and source.is_users(calls[-1].f_code.co_filename)):
        calls.append(frame)
        frame = frame.f_back
    return calls


def _optimizer_that_steps(frame: FrameType) -> str | None:
    """The class of the optimizer whose ``step`` a call is."""
    is_step = frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer)
    return type(frame.f_locals["self"]).__name__ if is_step else None
