"""What a loop does around its steps: the update of the parameters after a mini-batch (gradients are clipped, optimizers and
schedulers step), and evaluation mode for a while."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pippy.drivers.base.errors import DriverError
from pippy.drivers.model.model_on_workers import ModelOnWorkers
from pippy.drivers.model.optimizers.grad_scaler import PipelineGradScaler
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.ir.base.public_calls import check_amount
from pippy.ir.base.trees import describe
from pippy.ir.pipe import Pipe, follow_training_flags
from pippy.ir.trace.language_models import in_evaluation


@dataclass(frozen=True)
class Updates:
    """The update of the parameters after each mini-batch."""

    optimizers: tuple[PipelineOptimizer, ...]
    schedulers: tuple[Any, ...] = ()
    scaler: PipelineGradScaler | None = None
    max_norm: float | None = None
    clip_value: float | None = None

    def rates(self) -> tuple[float, ...]:
        """The learning rates as they are now."""
        return tuple(float(group["lr"]) for each in self.optimizers for group in each.param_groups if "lr" in group)

    def apply(self, driver: ModelOnWorkers) -> float | None:
        """Clip the gradients, update the parameters with them, and drop them. Returns their norm if ``max_norm`` is given."""
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
        """Note the values of an evaluation, which some schedulers step by."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(values["loss"])

    def parts(self) -> dict[str, Any]:
        """The optimizers, schedulers and the scaler, by their names in a checkpoint."""
        found = {**_named("optimizer", self.optimizers), **_named("scheduler", self.schedulers)}
        return found if self.scaler is None else {**found, "scaler": self.scaler}


def _named(name: str, parts: Sequence[Any]) -> dict[str, Any]:
    """Name the parts: one by the name alone, several by the name with a number."""
    return {name: parts[0]} if len(parts) == 1 else {f"{name}_{at}": part for at, part in enumerate(parts)}


def checked_updates(
    driver: Any, optimizer: Any, scheduler: Any, scaler: Any, max_norm: Any, clip_value: Any
) -> Updates:
    """The updates, if these are parts of the driver."""
    optimizers = _several(optimizer)
    for each in optimizers:
        if not isinstance(each, PipelineOptimizer) or each.commands is not driver.commands:
            whose = "of another driver" if isinstance(each, PipelineOptimizer) else f"a {type(each).__name__}"
            raise DriverError(
                f"optimizer= is {whose}, which cannot update the parameters on this driver's workers; give what "
                "driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-3) returned, or a list of these"
            )
    if not optimizers:
        raise DriverError(
            "optimizer= is an empty list; give what driver.instantiate_optimizer returned, or a list of these"
        )
    schedulers = () if scheduler is None else _several(scheduler)
    for each in schedulers:
        if not hasattr(each, "step") or isinstance(each, torch.optim.Optimizer):
            raise DriverError(
                f"scheduler={describe(each)}: give a learning rate scheduler of torch's, or a list of several"
            )
    if scaler is not None and not (isinstance(scaler, PipelineGradScaler) and scaler is driver._grad_scaler):
        raise DriverError(
            f"scaler={describe(scaler)} is not this driver's scaler; give what driver.instantiate_grad_scaler() "
            "returned last"
        )
    if scaler is None and driver._grad_scaler is not None and driver._grad_scaler.is_enabled():
        raise DriverError("the driver has a GradScaler, through which its optimizers must step; give it: scaler=scaler")
    for name, value in (("max_norm", max_norm), ("clip_value", clip_value)):
        check_amount(name, value, "the most that gradients may have", DriverError, none="for no clipping")
    return Updates(optimizers, schedulers, scaler, max_norm, clip_value)


def check_trains(driver: ModelOnWorkers, what: str) -> None:
    """Raise unless a step of this driver leaves gradients."""
    if driver.compiled_pipe.loss is None:
        raise DriverError(f"{what}(): the Pipe has no loss to train with; give pipeline() a loss_fn")
    if not torch.is_grad_enabled():
        raise DriverError(
            f"{what}() is called inside of torch.no_grad() or inference_mode, where no gradients are computed; call "
            "it outside"
        )


def loss_alone(driver: ModelOnWorkers) -> dict[str, Any]:
    """The arguments with which `run` gives the loss alone. What the model returns beside it stays on the workers."""
    return (
        {} if driver.compiled_pipe.loss_module is not None or driver.compiled_pipe.loss is None else {"outputs": False}
    )


@contextmanager
def evaluating(pipe: Pipe) -> Iterator[None]:
    """Put all stages in evaluation mode inside; afterwards each module has its mode of before."""
    follow_training_flags(pipe)
    try:
        with in_evaluation(pipe):
            yield
    finally:
        follow_training_flags(pipe)


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)
