"""`torch.amp.GradScaler` for the loss of a driver.

    driver.run ──the scale──▶ the worker of the last stage: the gradient of the loss is the scale, and not 1
                              each worker, when its part of the step ends: its gradients are divided by the scale
    driver.run ◀────────────  each worker: which of its gradients are not finite

So the gradients on the workers are always those of the loss itself. The controller knows after each step, without another
message, whether an optimizer may step. `unscale_` only reads that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from pippy.drivers.base.errors import DriverError, OptimizerError
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.ir.base.public_calls import check_words


class PipelineGradScaler(torch.amp.GradScaler):
    """What `driver.instantiate_grad_scaler` gives: torch's, but for what the workers do. Its states are torch's."""

    def __init__(self, commands: DriverCommands, scalers: Sequence[torch.amp.GradScaler] = (), **options: Any) -> None:
        """``scalers`` are all of the driver; the last of them is in use."""
        check_words("driver.instantiate_grad_scaler", options, torch.amp.GradScaler)
        super().__init__("cpu", **options)
        self._commands, self._scalers = commands, scalers
        if self._enabled:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def __repr__(self) -> str:
        return f"<PipelineGradScaler, {f'scale {self.get_scale():g}' if self._enabled else 'not enabled'}>"

    @property
    def scale_of_steps(self) -> float | None:
        """The scale of the loss in the next step; None if the scaler is not enabled."""
        return self.get_scale() if self._enabled else None

    def scale(self, outputs: Any) -> Any:
        """Raises: `driver.run` has scaled the loss already."""
        raise DriverError(
            "scaler.scale(loss) is not needed: driver.run scales the loss and runs the backward on the workers; "
            "leave scaler.scale(loss).backward() out, and call scaler.step(optimizer) after driver.run"
        )

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whether the gradients of an optimizer are finite. The workers have unscaled them already."""
        if not self._enabled:
            return
        self._check_optimizer(optimizer)
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
        if stage is not OptState.READY:
            name = "unscale_" if stage is OptState.UNSCALED else "step"
            raise OptimizerError(
                f"scaler.unscale_(optimizer) was called after scaler.{name}(optimizer), but an update may have only "
                "one unscale_, before its step; call scaler.update() when all optimizers have stepped"
            )
        super().unscale_(optimizer)

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, torch.Tensor]:
        """What torch's `unscale_` calls, with more arguments. Returns 1 for a gradient that is not finite, and 0 for none."""
        self._commands.wait()
        names = [name for name, _ in optimizer.named_parameters()]
        if not self._commands.nonfinite.stepped(names):
            raise OptimizerError(
                "the scaler has scaled no gradients of this optimizer since the last zero_grad(); call driver.run first"
            )
        nonfinite = float(bool(self._commands.nonfinite.among(names)))
        return {torch.device("cpu"): torch.tensor(nonfinite, dtype=torch.float32)}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`optimizer.step()`, on all workers if all gradients of the optimizer are finite, and else on none."""
        self._check_optimizer(optimizer)
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise OptimizerError(
                "scaler.step(optimizer) was called twice; call scaler.update() when all optimizers have stepped, once for each "
                "update"
            )
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        self._commands.parameters_updated()  # or they were to be
        return None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Make the scale larger or smaller, as torch's GradScaler does."""
        if self._enabled and new_scale is None and not self._has_looked():
            raise OptimizerError(
                "scaler.update() was called without scaler.step(optimizer) before it; for each update call "
                "driver.run, scaler.step(optimizer), and then scaler.update()"
            )
        super().update(new_scale)

    def begin_again(self, state: Mapping[str, Any] | None) -> None:
        """Go back to a state of before, between two updates; None if there was no scaler then."""
        if self._enabled:
            if state:
                self.load_state_dict(dict(state))
            self._per_optimizer_states.clear()

    def _has_looked(self) -> bool:
        return any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())

    def _check_optimizer(self, optimizer: Any) -> None:
        if self._scalers[-1:] != [self]:
            raise OptimizerError(
                "this scaler was replaced by a later one of its driver; use what instantiate_grad_scaler returned last"
            )
        if not isinstance(optimizer, PipelineOptimizer) or optimizer.commands is not self._commands:
            raise OptimizerError(
                f"this {type(optimizer).__name__} was not made by instantiate_optimizer of the scaler's driver; for "
                "an optimizer of this process use a torch.amp.GradScaler, and for an optimizer of another driver "
                "use that driver's scaler"
            )
        narrow = [name for name, parameter in optimizer.named_parameters() if parameter.dtype is torch.float16]
        if self._enabled and narrow and optimizer.master_dtype is None:
            raise OptimizerError(
                f"{narrow[0]!r} is float16, and its unscaled gradient would be float16 too, where small numbers "
                "become zero; give instantiate_optimizer(..., master_dtype=torch.float32)"
            )

    def __reduce__(self) -> Any:
        raise TypeError("a scaler belongs to its driver and cannot be pickled; pickle scaler.state_dict()")
