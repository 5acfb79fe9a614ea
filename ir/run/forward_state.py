"""What a forward may change besides its outputs: buffers, attributes and random numbers. It is kept as it was before.

    first run       note what there is, run, keep what has changed as it was before
    run again       put that in the place of what is there now, run, put back what was there

Tensors are exchanged, not written: a graph that has saved a buffer for its backward would find that it has changed.

Layers of the user's own may ask which of both it is: `is_checkpointing`, `is_recomputing`.
"""

import random
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pippy.ir.run.in_place import Snapshot, is_of_torch
from pippy.ir.run.random_state import RandomState

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, dict, set, deque)
_MISSING = object()

Place = tuple[dict[str, Any], str]  # the dict of a module, and a name in it


@dataclass(frozen=True)
class Change:
    """Something that a forward has changed, as it was before: it is ``name`` in ``held``."""

    held: dict[str, Any]
    name: str
    before: Any


class Before:
    """What modules hold before a forward. ``copied`` says which tensors are copied: all, or those that are known to change."""

    def __init__(self, modules: Sequence[nn.Module], known: set[tuple[int, str]] | None) -> None:
        self.held = list(_held(modules))
        self.values = [{name: _shallow(value) for name, value in _own(held).items()} for held in self.held]
        self.same = [_own(held) for held in self.held]
        places = {
            (number, name): value
            for number, values in enumerate(self.same)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        copied = places if known is None else [each for each in places if each in known]
        # Some kernels write the statistics of a batch normalization, and torch counts no change.
        self.tensors = Snapshot(places, copied, compares=known is None)

    def changes(self) -> tuple[list[Change], set[tuple[int, str]], bool]:
        """What has changed since; the tensors that were written, by number and name; and whether all is known as it was."""
        changes: list[Change] = []
        copies = self.tensors.copies
        written = set(self.tensors.changed())
        if not self.tensors.compares:  # known from an earlier forward
            written |= copies.keys()
        for number, held in enumerate(self.held):
            before, same, now = self.values[number], self.same[number], _own(held)
            for name in before.keys() | now.keys():
                old = same.get(name, _MISSING)
                if (number, name) in written:
                    changes.append(Change(held, name, copies.get((number, name), old)))
                elif now.get(name, _MISSING) is not old or not _same_items(before.get(name, _MISSING), old):
                    changes.append(Change(held, name, before.get(name, _MISSING)))
        return changes, written, written <= copies.keys()

    def put_back(self) -> None:
        """Have all as it was, for good. Tensors that were written stay the same objects."""
        changes, written, _ = self.changes()
        for each in changes:
            _set(each.held, each.name, each.before)
        with torch.no_grad():
            for number, name in written:
                tensor, copied = self.same[number][name], self.tensors.copies[number, name]
                if not tensor.is_inference():
                    if tensor.shape != copied.shape:
                        tensor.resize_(copied.shape)
                    tensor.copy_(copied)
                    self.held[number][name] = tensor


@contextmanager
def as_before(changes: Sequence[Change]) -> Iterator[None]:
    """Inside, what a forward has changed is as it was before it."""
    now = [each.held.get(each.name, _MISSING) for each in changes]
    try:
        restore(changes)
        yield
    finally:
        for each, value in zip(changes, now):
            _set(each.held, each.name, value)


def restore(changes: Sequence[Change]) -> None:
    """Have what a forward has changed as it was before it."""
    for each in changes:
        _set(each.held, each.name, each.before)


def _held(modules: Sequence[nn.Module]) -> Iterator[dict[str, Any]]:
    """The dicts that a forward may change: buffers, and the attributes of modules that are not torch's."""
    for module in modules:
        own = not is_of_torch(module)  # it may register a buffer
        if module._buffers or own:
            yield module._buffers
        if own:
            yield module.__dict__


def _own(held: dict[str, Any]) -> dict[str, Any]:
    """The entries of a dict that are no part of every module."""
    if "_buffers" not in held:
        return dict(held)
    return {name: value for name, value in held.items() if name not in _OF_EVERY_MODULE}


def _shallow(value: Any) -> Any:
    return value.copy() if type(value) in _CONTAINERS else value


def _same_items(before: Any, now: Any) -> bool:
    """Whether a list, dict or set has the same items as its copy."""
    if type(now) not in _CONTAINERS:
        return True
    if len(before) != len(now):
        return False
    if isinstance(now, dict):
        return all(name in before and before[name] is value for name, value in now.items())
    return before == now if isinstance(now, set) else all(one is other for one, other in zip(before, now))


def _set(held: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        held.pop(name, None)
    else:
        held[name] = value


class RandomNumbers:
    """The state of all random numbers that some modules draw: torch's, Python's, numpy's, and generators that they hold."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        values = [value for module in modules for value in module.__dict__.values()]
        self.generators = [_accessors(value) for value in values if _is_generator(value)]
        self.devices = [device] if device.type == "cuda" else []
        self.only_torchs = all(is_of_torch(module) and not _has_hooks(module) for module in modules)

    def now(self) -> "RandomNumbersThen":
        """The states now."""
        return RandomNumbersThen(
            self, RandomState.current(self.devices, self.only_torchs), [get() for get, _ in self.generators]
        )


@dataclass(frozen=True)
class RandomNumbersThen:
    """The states of random numbers at some time."""

    of: RandomNumbers
    usual: RandomState
    own: Sequence[Any]

    def is_now(self) -> bool:
        """Whether nothing was drawn since."""
        same = all(_same_state(then, get()) for then, (get, _) in zip(self.own, self.of.generators))
        return same and self.usual.is_current()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, the states are those; afterwards as before."""
        now = self.of.now()
        try:
            self.restore()
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        """Have these states again."""
        self.usual.restore()
        for then, (_, set) in zip(self.own, self.of.generators):
            set(then)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    numpys = (numpy.random.Generator, numpy.random.RandomState) if numpy else ()
    return isinstance(value, (torch.Generator, random.Random, *numpys))


def _accessors(generator: Any) -> tuple[Any, Any]:
    """How the state of a generator is read and set."""
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


def _same_state(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else repr(one) == repr(other)


class _Now(threading.local):
    checkpointing = recomputing = False


_now = _Now()


def is_checkpointing() -> bool:
    """Whether this forward keeps its inputs only, and will be computed again (`checkpoint=` of a driver). For your own layers.

    While a model is traced, this is refused: ask in a leaf module.

    >>> is_checkpointing()
    False
    """
    return is_now("checkpointing")


def is_recomputing() -> bool:
    """Whether this forward is computed again, for its backward (`checkpoint=` of a driver). For your own layers.

    A layer that counts its calls should not count this one. While a model is traced, this is refused: ask in a leaf module.

    >>> import torch
    >>> class Counting(torch.nn.Module):
    ...     calls = []
    ...     def forward(self, x):
    ...         if not is_recomputing():
    ...             self.calls.append(len(x))
    ...         return x
    >>> Counting()(torch.zeros(3)).shape, Counting.calls
    (torch.Size([3]), [3])
    """
    return is_now("recomputing")


def is_now(what: str) -> bool:
    """Whether a forward of this thread is that, "checkpointing" or "recomputing"."""
    return getattr(_now, what)


@contextmanager
def said(name: str) -> Iterator[None]:
    """Inside, a forward of this thread is that."""
    before = getattr(_now, name)
    setattr(_now, name, True)
    try:
        yield
    finally:
        setattr(_now, name, before)
