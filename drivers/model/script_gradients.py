"""`.grad` of a parameter of this process whose gradient a driver has on its workers.

Whoever asks for it, or sets it, gets an error that says what to call instead: an optimizer of this process, or
`torch.nn.utils.clip_grad_norm_`, would take None for no gradient, and do nothing. While a driver is there, the attribute is a
property of `nn.Parameter`. Torch's own questions are answered as before, as those of ``model.to``; so is everyone once the
script has gradients of its own.
"""

import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from pippy.drivers.base.errors import DriverError, OptimizerError
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.ir.base import source

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
