"""Notices an optimizer of this process that steps parameters of a driver. Their gradients are on the workers."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from pippy.drivers.base.errors import OptimizerError
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.session.driver_commands import DriverCommands

_trained_by: Any = WeakIdKeyDictionary()  # from a parameter of this process to its driver's DriverCommands
_hooks: list[Any] = []


def watch_local_optimizers(parameters: Iterable[torch.Tensor], commands: DriverCommands) -> None:
    """From now on, an optimizer that steps these parameters, all without gradients, raises if the driver has trained."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_check))
    for parameter in parameters:
        _trained_by[parameter] = weakref.ref(commands)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, PipelineOptimizer):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        return
    for parameter in parameters:
        commands = _trained_by[parameter]() if parameter in _trained_by else None
        if commands is not None and commands.trained:
            name = type(optimizer).__name__
            raise OptimizerError(
                f"this {name} has updated nothing: its parameters are those of this process, which have no "
                "gradients, because the driver trains copies on the workers. Make the optimizer with "
                f"driver.instantiate_optimizer(torch.optim.{name}, ...), and call driver.copy_to(model) to get the "
                "trained parameters"
            )
