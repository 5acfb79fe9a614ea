"""Hooks that run on a worker: those on gradients of parameters, and those of modules that change what they hold.

The hooks on the gradient of a parameter are called once in a step, on the worker where the gradient becomes whole. A hook of a
module runs with copies: the script would not see what it changes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import DriverError, PackingError
from pippy.drivers.protocol.state import NamedHooks, TensorLocation, WorkerHooks, same_bytes, unreadable
from pippy.drivers.wire.pickling import Pickled, pickle_by_value, unpickle
from pippy.ir.base.names import named_state
from pippy.ir.record.reached import HOOK_ATTRIBUTES

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
        held, values = (None, None) if key in self._tried else (_copied(own, self._held), parameter.detach().clone())
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
        if held is not None and not same_bytes(held, _copied(own, self._held)):
            raise DriverError(
                f"a gradient hook of {own.name!r} changes an object that it refers to (a list, a counter, an "
                "attribute). The hook runs on a worker with copies of such objects, so the script would not see "
                "the change; let the hook only return the gradient, and read gradients after the step: "
                "driver.gradients()"
            )
        self._tried.add(key)
        return found


@contextmanager
def hooks_hold_the_same(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """A context that raises at its end if a hook of the modules of these stages has changed what it holds.

    The modules and their tensors do not count: what a hook changes there is part of the stage.

    >>> seen, linear = [], nn.Linear(2, 2)
    >>> handle = linear.register_forward_hook(lambda module, args, output: seen.append(output))
    >>> with hooks_hold_the_same({"submod_0": linear}):
    ...     seen.append(1)
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: a forward hook of 'submod_0' changes an object that it refers to ...
    """
    held: dict[int, Any] = {}
    for call, stage in modules.items():
        held |= {id(tensor): f"{call}.{name}" for name, tensor in named_state(stage)}
        held |= {id(module): f"{call}.{path}" for path, module in stage.named_modules()}
    found = list(_hooks(modules))
    before = [_pickled(hook, held) for _, hook in found]
    yield
    for (name, hook), held_before in zip(found, before):
        held_now = None if held_before is None else _pickled(hook, held)
        if held_before is not None and held_now is not None and not same_bytes(held_before, held_now):
            raise DriverError(
                f"{name} changes an object that it refers to (a list, a counter, an attribute). The hook runs on a "
                "worker, once for each micro-batch, with copies of such objects, so the script would not see the "
                "change. Remove the hook, or let the model return what the hook records: driver.run(..., "
                "outputs=True)"
            )


def _hooks(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """What each hook is, and the hook."""
    for call, stage in modules.items():
        for path, module in stage.named_modules(prefix=call):
            for kind in HOOK_ATTRIBUTES:
                what = kind.strip("_").removesuffix("s").replace("_", " ")
                for hook in getattr(module, kind).values():
                    yield f"a {what} of {path!r}", hook


def _pickled(hook: Any, held: Mapping[int, Any]) -> Pickled | None:
    try:
        return _copied(hook, held)
    except PackingError:
        return None  # it came here inside of its module, and is a part of it


def _copied(hooks: Any, held: Mapping[int, Any]) -> Pickled:
    """Hooks as bytes, with copies of the tensors in them."""
    data, tensors = pickle_by_value(hooks, held)
    return Pickled(data, [each.clone() for each in tensors])
