"""What a worker holds for one driver, taken and put in place: parameters, buffers, states of optimizers, random numbers.

snapshot ──▶ the files of a checkpoint      state_writer.py, state_reader.py      ──▶ restore
         ──▶ a neighbour                    kept_states.py                        ──▶
         ──▶ the controller                 GiveState and RestoreState            ──▶

hold     ──▶ the worker itself              while something is tried: HoldState   ──▶ put_back
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from pippy.drivers.files.manifest import random_state, random_values
from pippy.drivers.protocol.state import TensorLocation, WorkerState
from pippy.drivers.worker.gradients.gradients import Gradients
from pippy.drivers.worker.gradients.worker_optimizer import WorkerOptimizer
from pippy.drivers.worker.measure.leave_unchanged import as_now
from pippy.ir.base.trees import map_tensors
from pippy.ir.run.forward_state import RandomNumbers
from pippy.ir.run.random_state import RandomState


class Snapshots:
    """Takes and restores the state of one driver's ``modules`` and ``optimizers``; ``tensor`` gives that at a location."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[int, WorkerOptimizer],
        gradients: Gradients,
        tensor: Callable[[TensorLocation], torch.Tensor],
        device: torch.device,
    ) -> None:
        self.modules, self.optimizers, self.gradients, self.tensor = modules, optimizers, gradients, tensor
        self.device, self._gpus = device, (device,) if device.type == "cuda" else ()

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
        """A copy of all, in the host's memory."""
        places = dict(self._places(nn.Module.named_parameters, nn.Module.named_buffers))
        own = {
            number: [place for place, each in places.items() if id(each) in optimizer.parameters]
            for number, optimizer in self.optimizers.items()
        }
        return cast(WorkerState, map_tensors(lambda each: each.to("cpu", copy=True), self.snapshot(places, own)))

    def of_stages(self, states: Sequence[WorkerState]) -> WorkerState:
        """What some states, of other workers too, have of this worker's stages and optimizers; no random numbers."""
        tensors = {at: each for state in states for at, each in state.tensors.items() if at.call in self.modules}
        optimizers = {
            number: {
                at: each
                for state in states
                for at, each in state.optimizers.get(number, {}).items()
                if at.call in self.modules and id(self.tensor(at)) in optimizer.parameters
            }
            for number, optimizer in self.optimizers.items()
            if any(number in state.optimizers for state in states)
        }
        return WorkerState(tensors, optimizers)

    def _places(
        self, *named: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]]
    ) -> Iterator[tuple[TensorLocation, torch.Tensor]]:
        """The parameters or buffers of each stage, and where they are: one that several stages have is at several places."""
        for call, module in self.modules.items():
            for listed in named:
                for name, each in listed(module):
                    yield TensorLocation(call, name), each

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

    def hold_buffers(self, random: bool) -> Callable[[], None]:
        """What puts back the buffers, the attributes of modules and the random numbers that there are now."""
        modules = list(dict.fromkeys(each for module in self.modules.values() for each in module.modules()))
        numbers = RandomNumbers(modules, self.device).now() if random else None
        unchanged = as_now([*self.modules.values()])

        def put_back() -> None:
            unchanged()
            if numbers is not None:
                numbers.restore()

        return put_back

    def hold(self, written: Iterable[TensorLocation] | None = None, random: bool = True) -> Callable[[], None]:
        """Go on without gradients. What it returns puts all in place again, to the bit, with attributes and gradients.

        Optimizers may make a step meanwhile; not if it is said which parameters are ``written``, that is, by forward.
        """
        if written is None:
            places = {id(each): place for place, each in self._places(nn.Module.named_parameters)}
            written, optimizers = places.values(), self.optimizers
        else:
            written, optimizers = [each for each in written if each.call in self.modules], {}
        parameters = map_tensors(torch.clone, self.snapshot(written, {}, random=False))
        states = {number: each.copied_state() for number, each in optimizers.items()}
        unchanged, gradients = self.hold_buffers(random), self.gradients.take_out()

        def put_back() -> None:
            if parameters.tensors:
                self.restore(parameters)
            unchanged()
            for number, state in states.items():
                self.optimizers[number].put_back(state)
            self.gradients.put_back(gradients)

        return put_back
