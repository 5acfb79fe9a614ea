"""The step of a driver's optimizer as plain torch does it: the same class, options and state, for the plain model."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.worker.gradients.worker_optimizer import MASTER


class PlainOptimizer:
    """A copy of a `PipelineOptimizer` as it is now. Its state is fetched from the workers."""

    def __init__(self, optimizer: PipelineOptimizer) -> None:
        self.factory, self.master_dtype = optimizer.factory, optimizer.master_dtype
        state = optimizer.state_dict()
        self.groups: list[dict[str, Any]] = copy.deepcopy(state["param_groups"])
        self.state: Mapping[str, Mapping[str, Any]] = state["state"]
        self.names = [name for group in self.groups for name in group["params"]]

    def step(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Update the parameters by their gradients, once; the state stays as it is."""
        updated = {name: self._master(name, parameters[name]) for name in self.names}
        optimizer = self.factory(
            [{**group, "params": [updated[name] for name in group["params"]]} for group in self.groups]
        )
        for name in self.names:
            state = {key: copy.deepcopy(value) for key, value in self.state.get(name, {}).items() if key != MASTER}
            if state:
                device = parameters[name].device
                optimizer.state[updated[name]] = {
                    key: value.to(device) if isinstance(value, torch.Tensor) and key != "step" else value
                    for key, value in state.items()
                }
        optimizer.step()
        with torch.no_grad():
            for name in self.names:
                if updated[name] is not parameters[name] and updated[name].grad is not None:
                    parameters[name].copy_(updated[name])

    def _master(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that torch's optimizer updates for a parameter: the parameter, or a copy of it with more bits."""
        dtype = self.master_dtype
        if dtype is None or not parameter.is_floating_point() or parameter.dtype == dtype:
            return parameter
        master = self.state.get(name, {}).get(MASTER, parameter).detach().to(parameter.device, dtype, copy=True)
        master.requires_grad_()
        master.grad = None if parameter.grad is None else parameter.grad.to(dtype)
        return master
