"""What a worker holds for one driver, taken and put in place: parameters, buffers, states of optimizers, random numbers.

snapshot ──▶ the files of a checkpoint      state_writer.py, state_reader.py      ──▶ restore
         ──▶ a neighbour                    kept_states.py                        ──▶
         ──▶ the controller                 GiveState and RestoreState            ──▶
"""

from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import nn

from pippy.drivers.files.plain_values import random_state, random_values
from pippy.drivers.protocol.parameters import TensorLocation
from pippy.drivers.protocol.states import WorkerState
from pippy.drivers.worker.gradients.worker_optimizer import WorkerOptimizer
from pippy.ir.base.trees import map_tensors
from pippy.ir.run.random_state import RandomState


class Snapshots:
    """Takes and restores the state of one driver's ``modules`` and ``optimizers``; ``tensor`` gives that at a location."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[int, WorkerOptimizer],
        tensor: Callable[[TensorLocation], torch.Tensor],
        device: torch.device,
    ) -> None:
        self.modules, self.optimizers, self.tensor = modules, optimizers, tensor
        self._gpus = (device,) if device.type == "cuda" else ()

    def snapshot(
        self,
        tensors: Iterable[TensorLocation],
        optimizers: Mapping[int, Iterable[TensorLocation]],
        random: bool = True,
    ) -> WorkerState:
        """What there is at these locations. It shares memory with what the worker has."""
        return WorkerState(
            {place: self.tensor(place).detach() for place in tensors},
            {
                number: {
                    place: state
                    for place in places
                    if number in self.optimizers and (state := self.optimizers[number].state_of(id(self.tensor(place))))
                }
                for number, places in optimizers.items()
            },
            random_values(RandomState.current(self._gpus)) if random else None,
        )

    def whole(self) -> WorkerState:
        """A copy of all."""
        places = {
            TensorLocation(call, name): each
            for call, module in self.modules.items()
            for name, each in (*module.named_parameters(), *module.named_buffers())
        }
        once = {id(each): place for place, each in places.items()}
        own = {number: [once[key] for key in each.parameters] for number, each in self.optimizers.items()}
        return cast(WorkerState, map_tensors(torch.clone, self.snapshot(places, own)))

    @torch.no_grad()
    def restore(self, state: WorkerState, is_kept: bool = True) -> None:
        """Put a state in place. If it ``is_kept``, optimizers get copies of it, which they will change."""
        for place, value in state.tensors.items():
            self.tensor(place).copy_(value)
        for optimizer in self.optimizers.values():
            optimizer.parameters_changed = True
        for number, states in (map_tensors(torch.clone, state.optimizers) if is_kept else state.optimizers).items():
            if number in self.optimizers:
                self.optimizers[number].load_state({id(self.tensor(place)): own for place, own in states.items()})
        if state.random is not None:
            random_state(state.random, self._gpus).restore()
