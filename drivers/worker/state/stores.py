"""What a worker holds for one driver, taken and put in place: parameters, buffers, states of optimizers, random numbers.

snapshot ──▶ the files of a checkpoint      Disk                                  ──▶ restore
         ──▶ a neighbour                    NeighbourCopies                       ──▶
         ──▶ the controller                 GiveState and RestoreState            ──▶

hold     ──▶ the worker itself              while something is tried: HoldState   ──▶ put_back

A part of a checkpoint is read beside what the worker has first, all of it, and then put in its place. From the copies in memory
a run goes on when a worker was lost:

keep:   the own copy ──▶ the next worker       take:   a new process ◀── its own copy, from the next worker
        the worker before ──▶ its copy                               ◀── the copy of the worker before it

Where the stages are placed anew, a worker takes the copies of those that had its stages.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from pippy.drivers.base.beside import beside
from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.manifest import random_state, random_values
from pippy.drivers.files.safetensors_files import StoredTensor, check_writable, write_tensors
from pippy.drivers.files.synced_files import not_there
from pippy.drivers.protocol.commands import Failure
from pippy.drivers.protocol.state import (
    KeepState,
    ReadState,
    TakeKept,
    TakeState,
    TensorLocation,
    WorkerState,
    WriteState,
    WrittenState,
)
from pippy.drivers.wire.received_values import Interrupted
from pippy.drivers.worker.gradients.gradients import Gradients
from pippy.drivers.worker.gradients.worker_optimizer import WorkerOptimizer
from pippy.drivers.worker.measure.leave_unchanged import as_now
from pippy.ir.base.trees import describe, map_tensors
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
        self, tensors: Iterable[TensorLocation], optimizers: Mapping[int, Iterable[TensorLocation]], random: bool = True
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


_Files = Mapping[str, Mapping[str, torch.Tensor]]  # by the name of the file, then of the tensor


class Disk:
    """The files of checkpoints, for one driver: written on the thread of the worker, or beside it; and read.

    What was read is kept until it is taken or dropped, so that a fault in it changes nothing.
    """

    def __init__(self, snapshots: Snapshots, given_up: Callable[[], bool]) -> None:
        self._snapshots, self._given_up = snapshots, given_up
        self._beside, self._found = Future[WrittenState | Failure](), WorkerState()

    def put(self, message: WriteState) -> WrittenState | None:
        """Write the files; with ``copy``, begin to."""
        wanted = {number: tuple(places.values()) for number, (_, places) in message.optimizers.items()}
        state = self._snapshots.snapshot(message.tensors.values(), wanted)
        files = {message.file: {name: state.tensors[place] for name, place in message.tensors.items()}}
        others: dict[int, dict[str, dict[str, Any]]] = {}
        for number, (file, places) in message.optimizers.items():
            own = state.optimizers[number]
            files[file], others[number] = _parted({name: own.get(place, {}) for name, place in places.items()})
        files = {name: tensors for name, tensors in files.items() if tensors}
        for tensors in files.values():
            check_writable(tensors)
        if not message.copy:
            return self._written(message, files, others, state.random, self._check)
        copied = {file: {name: _copied(each) for name, each in own.items()} for file, own in files.items()}
        write = partial(self._written, message, copied, others, state.random, lambda: None)
        self._beside = beside(partial(_or_failure, write), "pippy checkpoint")
        return None

    def ask(self) -> WrittenState | Failure | None:
        """What became of what is written beside; None while it is under way. Any thread may call this."""
        return self._beside.result() if self._beside.done() else None

    def get(self, message: ReadState) -> None:
        """Read all, and check it."""
        self._found = WorkerState()
        try:
            self._found = WorkerState(
                self._tensors(message.tensors),
                {
                    number: {
                        place: {key: each.read() for key, each in state.items()} for place, state in states.items()
                    }
                    for number, states in message.optimizers.items()
                },
            )
        except FileNotFoundError as error:
            raise not_there(error.filename) from error

    def take(self, message: TakeState) -> None:
        """Put what was read where it belongs, or drop it."""
        found, self._found = self._found, WorkerState()
        if message.take:
            states = {
                number: {
                    place: {**read.get(place, {}), **others.get(place, {})} for place in read.keys() | others.keys()
                }
                for number, others in message.others.items()
                for read in [found.optimizers.get(number, {})]
            }
            self._snapshots.restore(WorkerState(found.tensors, states, message.random), is_kept=False)

    def _tensors(self, stored_at: Mapping[TensorLocation, StoredTensor]) -> dict[TensorLocation, torch.Tensor]:
        once: dict[StoredTensor, torch.Tensor] = {}  # copies of a parameter are read once
        for place, stored in stored_at.items():
            own = self._snapshots.tensor(place)
            if own.shape != stored.shape or own.dtype != stored.dtype:
                raise CheckpointError(
                    f"{place.name} is {describe(own)} on the worker, and in the checkpoint "
                    f"{describe(torch.empty(stored.shape, dtype=stored.dtype, device='meta'))}"
                )
            if stored not in once:
                once[stored] = stored.read()
        return {place: once[stored] for place, stored in stored_at.items()}

    def _check(self) -> None:
        if self._given_up():
            raise Interrupted("the checkpoint was given up")

    def _written(
        self, message: WriteState, files: _Files, others: Any, random: Any, goes_on: Callable[[], None]
    ) -> WrittenState:
        written = []
        for name, tensors in files.items():
            metadata = {**(message.tied if name == message.file else {}), "format": "pt"}
            try:
                written.append(write_tensors(message.folder, name, tensors, metadata, goes_on))
            except FileNotFoundError as error:
                raise not_there(message.folder) from error
        return WrittenState(tuple(written), others, random)


def _or_failure(write: Callable[[], WrittenState]) -> WrittenState | Failure:
    try:
        return write()
    except BaseException as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc(), where="WriteState")


def _parted(states: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The tensors of some states by "parameter/key", and what is no tensor by the parameters and keys."""
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and isinstance(key, str) and "/" not in key:
                tensors[f"{name}/{key}"] = value
            else:
                others.setdefault(name, {})[key] = value
    return tensors, others


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


CopiesOfPoints = dict[int, dict[int, WorkerState]]  # the copies of each point, by whose they are
RunExchange = Callable[[Any, int, Any], None]  # of instructions, in the command with a number, of what is passed on


class NeighbourCopies:
    """The copies for one driver on one worker, by their points, and by whose they are. ``exchange`` runs instructions."""

    def __init__(self, index: int, snapshots: Snapshots, exchange: RunExchange, kept: CopiesOfPoints | None) -> None:
        self.index, self.snapshots, self.exchange = index, snapshots, exchange
        self.kept: CopiesOfPoints = {} if kept is None else kept

    def put(self, message: KeepState, number: int) -> None:
        """Copy what the worker holds, send the copy to a neighbour, and take another's."""
        self.kept = {point: each for point, each in self.kept.items() if point == message.before}
        own = self.kept[message.point] = {self.index: self.snapshots.whole()}
        self.exchange(message.order, number, PassedStates(own))

    def get(self, message: TakeKept, number: int) -> None:
        """Go back to a point. What lost workers had of it comes from neighbours."""
        copies = self.kept.get(message.point, {})
        self.kept = {message.point: copies}
        self.exchange(message.order, number, PassedStates(copies))
        if message.sources:
            found = self.snapshots.of_stages([copies[source] for source in message.sources])
            random = copies[self.index].random if self.index in message.sources else None
            self.snapshots.restore(replace(found, random=random))


class PassedStates:
    """The copies of one point, by whose they are: the number of a worker is that of its copy in messages."""

    def __init__(self, states: dict[int, WorkerState]) -> None:
        self.states = states

    def leaving(self, send: Any) -> Iterable[tuple[int, WorkerState]]:
        """The copy that a send moves."""
        return [(send.of, self.states[send.of])]

    def awaited(self, receive: Any) -> Iterable[int]:
        """The number of the copy that a receive waits for."""
        return [receive.of]

    def take(self, number: int, value: WorkerState) -> None:
        """Have a copy from another worker."""
        self.states[number] = value
