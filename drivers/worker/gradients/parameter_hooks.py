"""Calls the hooks on gradients of parameters, once in a step, on the worker where a gradient becomes whole."""

from collections.abc import Callable
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.protocol.state import NamedHooks, TensorLocation, WorkerHooks, same_bytes, unreadable
from pippy.drivers.wire.pickling import Pickled, pickle_by_value, unpickle

Tensor = Callable[[TensorLocation], torch.Tensor]


class ParameterHooks:
    """The hooks of the parameters on one worker. ``tensor`` gives the one at a location.

    ``all`` has the ids of those that have hooks, on whatever worker these are called; and ``replacing`` of those whose hooks
    are called after the accumulation, so that what they leave takes the place of the gradient that was there.

    >>> ParameterHooks(WorkerHooks(), tensor=lambda place: torch.zeros(1)).all
    set()
    """

    def __init__(self, sent: WorkerHooks, tensor: Tensor) -> None:
        self.all = {id(tensor(place)) for place in sent.places}
        self.replacing = {id(tensor(place)) for place, replaces in sent.places.items() if replaces}
        self._held: dict[int, Any] = {}  # what stands for the model's tensors that the functions hold
        self._model_tensors: list[torch.Tensor] = []

        def held(each: TensorLocation | str) -> torch.Tensor:
            found = tensor(each) if isinstance(each, TensorLocation) else unreadable(each)
            self._held[id(found)] = each
            self._model_tensors.append(found)
            return found

        functions: dict[TensorLocation, NamedHooks] = {} if sent.functions is None else unpickle(sent.functions, held)
        self._own = {id(tensor(place)): (tensor(place), own) for place, own in functions.items()}
        self._tried: set[int] = set()

    def accumulated(
        self, key: int, gradient: torch.Tensor, before: torch.Tensor | None, scale: float | None
    ) -> torch.Tensor | None:
        """What the hooks of a parameter make of its gradient in a step, with ``before`` in it if they replace that.

        With ``scale``, the gradient is that of the loss times it, as the hooks of the plain model see it.
        """
        if key not in self._own:
            return gradient
        parameter, own = self._own[key]
        if before is not None:
            before = before.to(parameter.dtype, copy=True) if scale is None else (before * scale).to(parameter.dtype)
        held, values = (None, None) if key in self._tried else (self._pickled(own), parameter.detach().clone())
        version = parameter._version
        try:
            found = own.hooks.accumulated(parameter, gradient, before)
        except Exception as error:
            raise DriverError(f"a gradient hook of {own.name!r} failed: {type(error).__name__}: {error}") from error
        if parameter._version != version:
            if values is not None:
                with torch.no_grad():
                    parameter.copy_(values)
            raise DriverError(
                f"a gradient hook of {own.name!r} changes the parameter, but hooks run before it is known whether "
                "the step succeeds; change only the gradient, and update the parameter with "
                "driver.instantiate_optimizer"
            )
        if held is not None and not same_bytes(held, self._pickled(own)):
            raise DriverError(
                f"a gradient hook of {own.name!r} changes an object that it refers to (a list, a counter, an "
                "attribute). The hook runs on a worker with copies of such objects, so the script would not see "
                "the change; let the hook only return the gradient, and read gradients after the step: "
                "driver.gradients()"
            )
        self._tried.add(key)
        return found

    def _pickled(self, own: NamedHooks) -> Pickled:
        data, tensors = pickle_by_value(own, self._held)
        return Pickled(data, [each.clone() for each in tensors])
