"""Hooks of modules that change what they hold, which the script would not see: they run on a worker, with copies."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from pippy.drivers.base.errors import DriverError, PackingError
from pippy.drivers.protocol.state import same_bytes
from pippy.drivers.wire.pickling import Pickled, pickle_by_value
from pippy.ir.base.names import named_state
from pippy.ir.record.reached import HOOK_ATTRIBUTES


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
        data, tensors = pickle_by_value(hook, held)
    except PackingError:
        return None  # it came here inside of its module, and is a part of it
    return Pickled(data, [each.clone() for each in tensors])
