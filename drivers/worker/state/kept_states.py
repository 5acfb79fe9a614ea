"""Copies of a worker's state, and of a neighbour's, in its memory: from them a run goes on when a worker was lost.

keep:   the own copy ──▶ the next worker       take:   a new process ◀── its own copy, from the next worker
        the worker before ──▶ its copy                               ◀── the copy of the worker before it
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pippy.drivers.files.plain_values import random_state, random_values
from pippy.drivers.protocol.kept_states import KeepState, TakeKept
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.gradients.worker_optimizer import WorkerOptimizer
from pippy.ir.base.trees import map_tensors
from pippy.ir.run.random_state import RandomState
from pippy.ir.run.shared_tensors import get_tensor

KEPT_NUMBER = 1 << 26  # of copies in the keys of messages; those of gradient_sums.py are smaller


@dataclass
class KeptState:
    """A copy of what one worker holds: of its parameters and buffers, the states of optimizers, its random numbers."""

    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    optimizers: dict[int, dict[tuple[str, str], dict[str, Any]]] = field(default_factory=dict)
    random: Any = None


class KeptStates:
    """The copies for one driver on one worker, by their points, and by whose they are."""

    def __init__(
        self, index: int, modules: Mapping[str, nn.Module], transport: Transport, device: torch.device
    ) -> None:
        self.index, self.modules, self.transport, self.device = index, modules, transport, device
        self.kept: dict[int, dict[int, Any]] = {}

    def keep(self, message: KeepState, optimizers: Mapping[int, WorkerOptimizer], number: int) -> None:
        """Copy what the worker holds, send the copy to a neighbour, and take another's."""
        self.kept = {point: each for point, each in self.kept.items() if point == message.before}
        own = self.kept[message.point] = {self.index: self._copy(optimizers)}
        if message.to != self.index:
            self._send(message.to, number, self.index, own[self.index])
            own[message.of] = self._receive(number, message.of, message.of)

    def take(self, message: TakeKept, optimizers: Mapping[int, WorkerOptimizer], number: int) -> None:
        """Go back to a point. What lost workers had of it comes from neighbours."""
        kept = self.kept = {message.point: self.kept.get(message.point, {})}
        own = kept[message.point]
        for of, to in message.sends:
            self._send(to, number, of, own[of])
        for of, source in message.receives:
            own[of] = self._receive(number, of, source)
        self._restore(own[self.index], optimizers)

    def _copy(self, optimizers: Mapping[int, WorkerOptimizer]) -> KeptState:
        tensors = {place: each.detach().clone() for place, each in self._tensors().items()}
        places = {id(each): place for place, each in self._tensors().items()}
        states = {
            number: {
                places[key]: map_tensors(torch.clone, state) for key in each.parameters if (state := each.state_of(key))
            }
            for number, each in optimizers.items()
        }
        return KeptState(tensors, states, random_values(RandomState.current(self._gpus)))

    def _restore(self, kept: KeptState, optimizers: Mapping[int, WorkerOptimizer]) -> None:
        with torch.no_grad():
            for place, value in kept.tensors.items():
                self._tensor(place).copy_(value)
        for number, optimizer in optimizers.items():
            states = kept.optimizers.get(number, {})
            optimizer.load_state(
                {id(self._tensor(place)): map_tensors(torch.clone, state) for place, state in states.items()}
            )
        random_state(kept.random, tuple(self._gpus)).restore()

    def _tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """Each parameter and buffer of the worker, once."""
        found: dict[tuple[str, str], torch.Tensor] = {}
        for call, module in self.modules.items():
            found.update({(call, name): each for name, each in module.named_parameters()})
            found.update({(call, name): each for name, each in module.named_buffers()})
        return found

    def _tensor(self, place: tuple[str, str]) -> torch.Tensor:
        return get_tensor(self.modules[place[0]], place[1])

    @property
    def _gpus(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    def _send(self, to: int, number: int, of: int, kept: KeptState) -> None:
        self.transport.send(to, (number, KEPT_NUMBER, of), (kept.tensors, kept.optimizers, kept.random))

    def _receive(self, number: int, of: int, source: int) -> KeptState:
        return KeptState(*self.transport.receive((number, KEPT_NUMBER, of), source))
