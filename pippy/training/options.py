"""What `pippy.train` was asked for, checked before anything runs."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pippy.drivers.driver_base import PipelineDriverBase
from pippy.drivers.errors import DriverError
from pippy.drivers.grad_scaler import PipelineGradScaler
from pippy.drivers.optimizer import PipelineOptimizer
from pippy.ir.names import LOSS
from pippy.ir.trees import describe


@dataclass(frozen=True)
class Updates:
    """What happens to the parameters after each mini-batch."""

    optimizers: tuple[PipelineOptimizer, ...]
    schedulers: tuple[Any, ...] = ()
    scaler: PipelineGradScaler | None = None
    max_norm: float | None = None
    clip_value: float | None = None

    def rates(self) -> tuple[float, ...]:
        """The learning rates as they are now."""
        return tuple(float(group["lr"]) for each in self.optimizers for group in each.param_groups if "lr" in group)

    def apply(self, driver: PipelineDriverBase) -> float | None:
        """Clip the gradients, update the parameters with them, and drop them. Gives their norm, if it was taken."""
        norm = None
        if self.max_norm is not None:
            norm = float(driver.clip_grad_norm_(self.max_norm))
        if self.clip_value is not None:
            driver.clip_grad_value_(self.clip_value)
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        for scheduler in self.schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
        driver.zero_grad()
        return norm

    def evaluated(self, values: Mapping[str, float]) -> None:
        """An evaluation has given these: what some schedulers step by."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(values["loss"])

    def parts(self) -> dict[str, Any]:
        """What has a state, by the name that it has in a checkpoint."""
        found = {**_named("optimizer", self.optimizers), **_named("scheduler", self.schedulers)}
        return found if self.scaler is None else {**found, "scaler": self.scaler}


def _named(name: str, parts: Sequence[Any]) -> dict[str, Any]:
    """One is called by its name, several by a number behind it."""
    return {name: parts[0]} if len(parts) == 1 else {f"{name}_{at}": part for at, part in enumerate(parts)}


def checked_updates(
    driver: Any, optimizer: Any, scheduler: Any, scaler: Any, max_norm: Any, clip_value: Any
) -> Updates:
    """The updates, if these are parts of the driver."""
    check_driver(driver, "train")
    optimizers = _several(optimizer)
    for each in optimizers:
        if not isinstance(each, PipelineOptimizer) or each.commands is not driver.commands:
            whose = "of another driver" if isinstance(each, PipelineOptimizer) else f"a {type(each).__name__}"
            raise DriverError(
                f"optimizer= is {whose}, and the parameters are on the workers of this one; give what "
                "driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-3) gave, or a list of several"
            )
    if not optimizers:
        raise DriverError("optimizer= has none; give what driver.instantiate_optimizer gave, or a list of several")
    schedulers = () if scheduler is None else _several(scheduler)
    for each in schedulers:
        if not hasattr(each, "step") or isinstance(each, torch.optim.Optimizer):
            raise DriverError(
                f"scheduler={describe(each)}: give a learning rate scheduler of torch's, or a list of several"
            )
    if scaler is not None and not (isinstance(scaler, PipelineGradScaler) and scaler is driver._grad_scaler):
        raise DriverError(
            f"scaler={describe(scaler)} is not the one of this driver; give what driver.instantiate_grad_scaler() gave last"
        )
    if scaler is None and driver._grad_scaler is not None and driver._grad_scaler.is_enabled():
        raise DriverError(
            "the driver has a GradScaler, which is to step the optimizers; give it: train(..., scaler=scaler)"
        )
    for name, value in (("max_norm", max_norm), ("clip_value", clip_value)):
        if value is not None and not (_is_number(value) and value > 0):
            raise DriverError(f"{name}={describe(value)}: give a number above 0, or leave it out for no clipping")
    return Updates(optimizers, schedulers, scaler, max_norm, clip_value)


def loss_alone(driver: PipelineDriverBase) -> dict[str, Any]:
    """What to give `run` for the loss alone: what a model returns beside its loss stays on the workers."""
    return {} if LOSS in driver.compiled.split_gm._modules or driver.compiled.loss is None else {"outputs": False}


def check_driver(driver: Any, what: str) -> None:
    """Raise unless this is a driver that can train, and gradients are on."""
    if not isinstance(driver, PipelineDriverBase):
        raise DriverError(
            f"{what}() trains the model of a driver, and this is a {type(driver).__name__}; give a driver, as in "
            f"pippy.{what}(PipelineDriver1F1B(pipe, workers), data, optimizer, chunks=4, steps=100)"
        )
    if driver.compiled.loss is None:
        raise DriverError("the Pipe has no loss to train with; give pipeline() a loss_fn")
    if not torch.is_grad_enabled():
        raise DriverError(
            f"{what}() is called under torch.no_grad() or inference_mode, where there are no gradients; leave it"
        )


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Length:
    """How long to train: so many steps, or so many epochs, or what ends first. A step takes ``accumulate`` items."""

    steps: int | None
    epochs: int | None
    accumulate: int = 1

    @classmethod
    def checked(cls, steps: Any, epochs: Any, accumulate: Any) -> "Length":
        """The length, if it is one."""
        if steps is None and epochs is None:
            raise DriverError("how long? give steps=, the number of updates, or epochs=, how often data is read")
        for name, value in (("steps", steps), ("epochs", epochs), ("accumulate", accumulate)):
            check_count(name, value, name != "accumulate")
        return cls(steps, epochs, accumulate)

    def total(self, data: Any) -> int | None:
        """How many steps there will be, if that is known.

        >>> Length(None, 3, 2).total([1, 2, 3]), Length(5, 3, 2).total([1, 2, 3]), Length(None, 1).total(iter([1]))
        (6, 5, None)
        """
        found = [] if self.steps is None else [self.steps]
        if self.epochs is not None and hasattr(data, "__len__"):
            with suppress(TypeError):  # a DataLoader of a stream
                found.append(self.epochs * -(-len(data) // self.accumulate))
        return min(found, default=None)

    def is_over(self, step: int, epoch: int) -> bool:
        """Whether a run that has come so far is at its end.

        >>> Length(10, None).is_over(10, 0), Length(10, 3).is_over(5, 2)
        (True, False)
        """
        return (self.steps is not None and step >= self.steps) or (self.epochs is not None and epoch >= self.epochs)


def check_count(name: str, value: Any, optional: bool = True) -> None:
    """Raise unless this is a number of things, 1 or more."""
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DriverError(f"{name}={describe(value)}: give a whole number, 1 or more{', or leave it out' * optional}")
