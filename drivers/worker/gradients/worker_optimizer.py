"""An optimizer on a worker: torch's, over the worker's parameters, or over copies of them that have more bits.

    gradient ──▶ .grad of the copy ──▶ step of torch's optimizer ──▶ the copy ──rounded──▶ the parameter

A copy rounds to its parameter's value. If something else has set the parameter, as `load_state_dict` of a driver does, the copy
takes its value where it no longer rounds to it.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pippy.drivers.worker.gradients.gradients import Gradients
from pippy.ir.base.trees import map_tensors
from pippy.ir.base.without_dynamo import optimizers_import_no_dynamo

MASTER = "master_parameter"  # the name of a copy in the state of its parameter


def made_optimizer(optimizer_class: type, args: Sequence[Any], options: Mapping[str, Any], groups: Any) -> Optimizer:
    """An optimizer of parameters in groups. Workers get this function from the script, and have imported its module."""
    optimizers_import_no_dynamo()
    return optimizer_class(groups, *args, **options)


class WorkerOptimizer:
    """One optimizer over some parameters of one worker, by group. With ``master_dtype`` it has copies of that dtype."""

    def __init__(
        self,
        factory: Callable[[list[dict[str, Any]]], Optimizer],
        groups: Sequence[Mapping[str, Any]],
        master_dtype: torch.dtype | None,
    ) -> None:
        self.parameters = {id(parameter): parameter for group in groups for parameter in group["params"]}
        self.masters: dict[int, torch.Tensor] = {}
        for key, parameter in self.parameters.items():
            if master_dtype is not None and parameter.is_floating_point() and parameter.dtype != master_dtype:
                self.masters[key] = parameter.detach().to(master_dtype).requires_grad_()
        self.optimized = {**self.parameters, **self.masters}  # what torch's optimizer has
        self.optimizer = factory([{**g, "params": [self.optimized[id(p)] for p in g["params"]]} for g in groups])
        self.parameters_changed = False  # by something else than this optimizer

    def set_attributes(self, attributes: Mapping[int, Mapping[str, Any]]) -> None:
        """Give parameters, by their ids, the attributes that they have in the script. Others are removed."""
        for key, own in attributes.items():
            if key in self.optimized:
                vars(self.optimized[key]).clear()
                vars(self.optimized[key]).update(own)

    def step(self, gradients: Gradients, options: Iterable[Mapping[str, Any]]) -> None:
        """Update the parameters. ``options`` are those of each group, if they changed."""
        for group, changed in zip(self.optimizer.param_groups, options):
            group.update(changed)
        self._follow_parameters()
        gradients.set_grad(self.optimized)
        try:
            self.optimizer.step()
            self._round_masters()
        finally:
            gradients.clear_grad()
            for master in self.masters.values():
                master.grad = None

    def held(self) -> list[Any]:
        """What it holds beside the parameters: its state, and the copies of parameters."""
        return [*self.masters.values(), *self.optimizer.state.values()]

    @torch.no_grad()
    def _round_masters(self) -> None:
        for key, master in self.masters.items():
            if master.grad is not None:
                self.parameters[key].copy_(master)

    @torch.no_grad()
    def _follow_parameters(self) -> None:
        if self.parameters_changed:
            for key, master in self.masters.items():
                parameter = self.parameters[key]
                differs = master.to(parameter.dtype) != parameter
                master.copy_(torch.where(differs, parameter.to(master.dtype), master))
        self.parameters_changed = False

    def state_of(self, key: int) -> dict[str, Any] | None:
        """The state for the parameter with this id, and the copy of it. None if there is none, or no such parameter."""
        self._follow_parameters()
        state = self.optimizer.state.get(self.optimized[key]) if key in self.optimized else None
        master = self.masters.get(key)
        found = {**(state or {}), **({} if master is None else {MASTER: master.detach()})}
        return map_tensors(torch.Tensor.cpu, found) if found else None

    def load_state(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the state. ``states`` has that of each parameter, by its id; the optimizer keeps its tensors."""
        numbered = self.optimizer.state_dict()
        numbers = {key: number for number, key in enumerate(self.parameters)}
        numbered["state"] = {}
        for key, state in states.items():
            own = dict(state)
            if (master := own.pop(MASTER, None)) is not None and key in self.masters:
                self.masters[key].data.copy_(master)
            if own:
                numbered["state"][numbers[key]] = own
        self.optimizer.load_state_dict(numbered)
        self.parameters_changed = True

    def copied_state(self) -> dict[str, Any]:
        """A copy of all that a step may change, but for the parameters; `put_back` takes it."""
        parameters = {id(each): each for each in self.parameters.values()}
        return copy.deepcopy({**vars(self), "optimizer": vars(self.optimizer)}, parameters)

    def put_back(self, held: dict[str, Any]) -> None:
        """Have what was copied."""
        vars(self.optimizer).clear()
        vars(self.optimizer).update(held.pop("optimizer"))
        vars(self).update(held)
