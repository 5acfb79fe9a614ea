"""The optimizer of a Trainer: to schedulers and checkpoints a plain one, whose steps are done by the workers.

The Trainer needs an optimizer before the first batch is there, and the stages are made for the first batch. So there is a plain
optimizer first. It keeps the options, by which schedulers work, and a state that was loaded, until the workers have it.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from pippy.drivers.base.errors import OptimizerError
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.model.optimizers.grad_scaler import PipelineGradScaler
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer


class OptimizerOfTrainer(Optimizer):
    """A plain optimizer over the parameters of this process, and, once there is a driver, that of the driver.

    Its state dict is that of the plain optimizer, with the state of the workers.
    """

    _is_accelerate_prepared = True  # or accelerate would wrap it
    step_was_skipped = False  # by a scaler, which found a gradient that is not finite
    scaler: PipelineGradScaler | None = None

    def __init__(self, plain: Optimizer, check: Callable[[], None]) -> None:
        if not isinstance(plain, Optimizer) or hasattr(plain, "train"):
            raise OptimizerError(
                f"a {type(plain).__name__} changes parameters outside of its step, which on workers it cannot; choose an "
                "optimizer of torch's: TrainingArguments(optim='adamw_torch')"
            )
        self.plain, self.check = plain, check  # which raises if the workers have no gradients of this update
        self.driver: PipelineDriverBase | None = None
        self.on_workers: PipelineOptimizer | None = None
        self._names: dict[int, str] = {}  # of parameters, by their numbers in the plain optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the plain optimizer."""
        return self.plain.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the plain optimizer."""
        return self.plain.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state in this process, which is empty while the workers have it."""
        return self.plain.state

    def __repr__(self) -> str:
        return f"<OptimizerOfTrainer: {self.on_workers or type(self.plain).__name__ + ', not on workers yet'}>"

    def bind(self, driver: PipelineDriverBase) -> None:
        """Make the optimizer on the workers of a driver, with the state that is here."""
        if self.driver is driver:
            return
        self.unbind()
        named = {id(parameter): name for name, parameter in driver.pipe.named_parameters()}
        every = [each for group in self.param_groups for each in group["params"]]
        self._names = {number: named[id(each)] for number, each in enumerate(every) if id(each) in named}
        groups = [
            {**group, "params": [each for each in group["params"] if id(each) in named]} for group in self.param_groups
        ]
        takes = inspect.signature(type(self.plain)).parameters
        options = {name: value for name, value in self.defaults.items() if name in takes}
        self.driver = driver
        self.on_workers = driver.instantiate_optimizer(type(self.plain), param_groups=groups, **options)
        self._send_state()

    def unbind(self) -> None:
        """Take the state back from the workers, before their driver is closed."""
        if self.on_workers is not None:
            state = self.state_dict()
            self.driver = self.on_workers = None
            self.plain.load_state_dict(state)

    def _send_state(self) -> None:
        """Give the workers the state that was loaded here."""
        assert self.on_workers is not None
        if self.plain.state:
            state = self.plain.state_dict()["state"]
            by_name = {self._names[number]: its for number, its in state.items() if number in self._names}
            self._set_options()
            self.on_workers.load_state_dict({"state": by_name, "param_groups": self.on_workers.named_groups()})
            self.plain.state.clear()

    def _set_options(self) -> None:
        assert self.on_workers is not None
        for its, own in zip(self.on_workers.param_groups, self.param_groups):
            its.update({name: value for name, value in own.items() if name != "params"})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters on the workers, and drop their gradients there."""
        self.check()
        assert self.on_workers is not None and self.driver is not None
        self._set_options()
        if self.scaler is None:
            self.on_workers.step(closure)
        else:
            scale = self.scaler.get_scale()
            self.scaler.step(self.on_workers)
            self.scaler.update()
            self.step_was_skipped = self.scaler.get_scale() < scale
        self.driver.zero_grad()
        self.plain._opt_called = True  # type: ignore[attr-defined]  # for a scheduler of the plain optimizer, which warns else

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients on the workers."""
        if self.driver is not None:
            self.driver.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state dict of a plain optimizer, whose parameters have numbers."""
        state = self.plain.state_dict()
        if self.on_workers is not None:
            by_name = self.on_workers.state_dict()["state"]
            state["state"] = {number: by_name[name] for number, name in self._names.items() if name in by_name}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of a plain optimizer, or of this."""
        self.plain.load_state_dict(dict(state_dict))
        if self.on_workers is not None:
            self._send_state()
