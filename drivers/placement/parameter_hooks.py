"""The hooks on the gradients of a driver's parameters: which worker calls them, and what it is told."""

from collections.abc import Mapping

import torch

from pippy.drivers.base.errors import DriverError, PackingError
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.state import NamedHooks, TensorLocation, WorkerHooks
from pippy.drivers.wire.pickling import Pickled, pickle_by_value
from pippy.ir.base.names import named_state
from pippy.ir.pipe import Pipe
from pippy.ir.record.reached import reached_by
from pippy.ir.run.gradient_hooks import GradientHooks


class PlacedHooks:
    """What the workers of a driver are told of the hooks that its parameters have now.

    A hook runs where a gradient is complete: on the worker of its parameter, or on the worker that adds up the gradients of
    copies. It is sent by value. A parameter or buffer that it holds is the worker's own; one of another worker has no numbers.

    >>> from torch import nn
    >>> from pippy.ir.pipe import compiled_of
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    >>> hooks = PlacedHooks(pipe, PlacedPipe(compiled_of(pipe), [0, 1]))
    >>> handle = pipe.get_parameter("1.bias").register_hook(lambda gradient: gradient * 2)
    >>> [list(each.places) for each in hooks.now().values()]
    [[], [TensorLocation(call='submod_1', name='1.bias')]]
    """

    def __init__(self, pipe: Pipe, placed: PlacedPipe) -> None:
        self.pipe, self.placed = pipe, placed
        self._adds_up = {
            place: bucket.owner for bucket in placed.buckets for each in bucket.parameters for _, place in each.copies
        }
        self._now: Mapping[int, WorkerHooks] = {}

    def now(self) -> Mapping[int, WorkerHooks]:
        """What each worker is told; the same object as before if no hook has changed. Raises if a hook cannot be sent.

        The objects that a hook holds may have changed, so it is pickled each time.
        """
        hooks_by_place = {place: NamedHooks(self._name(place), hooks) for place, hooks in self._hooked().items()}
        if hooks_by_place or self._now:
            told = {worker: self._of_worker(worker, hooks_by_place) for worker in self.placed.workers}
            if told.keys() != self._now.keys() or not all(each.is_like(self._now[at]) for at, each in told.items()):
                self._now = told
        return self._now

    def of_copies(self, hooks: Mapping[int, WorkerHooks]) -> bool:
        """Whether a parameter with copies has a hook."""
        return any(place in self._adds_up for each in hooks.values() for place in each.places)

    def _hooked(self) -> dict[TensorLocation, GradientHooks]:
        found = {place: GradientHooks.of(tensor) for place, tensor in self.placed.model_parameters.items()}
        return {place: hooks for place, hooks in found.items() if hooks}

    def _name(self, place: TensorLocation) -> str:
        return self.placed.compiled.remap_qualname(f"{place.call}.{place.name}")

    def _of_worker(self, worker: int, own: Mapping[TensorLocation, NamedHooks]) -> WorkerHooks:
        here = {place: each for place, each in own.items() if worker in self.placed.workers_of(place.call)}
        called = {place: each for place, each in here.items() if self._adds_up.get(place, worker) == worker}
        places = {place: bool(each.hooks.after_accumulation) for place, each in here.items()}
        return WorkerHooks(places, self._pickled(called, worker) if called else None)

    def _pickled(self, hooks: Mapping[TensorLocation, NamedHooks], worker: int) -> Pickled:
        held = {id(tensor): self._stands_for(name, worker) for name, tensor in named_state(self.pipe)}
        own = {*held, *(id(each.value) for each in reached_by(hooks, "hooks"))}
        try:
            data, tensors = pickle_by_value(hooks, held, refused=(torch.optim.Optimizer,), own=own)
        except PackingError as error:
            raise DriverError(
                f"{', '.join(repr(each.name) for each in hooks.values())}: a gradient hook runs on the worker that "
                f"holds the parameter, but one of these hooks cannot be sent there: {error}. A hook is sent with "
                "all objects that it refers to; let it refer to numbers and tensors only. To update parameters, "
                "use driver.instantiate_optimizer"
            ) from error
        return Pickled(data, [each.clone() for each in tensors])  # the script may change its own

    def _stands_for(self, name: str, worker: int) -> TensorLocation | str:
        return next((place for at, place in self.placed.locations(name) if at == worker), name)
