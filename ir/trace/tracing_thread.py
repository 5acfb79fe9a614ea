"""One thread traces at a time, and what tracing patches in torch acts in that thread only.

    thread 1, which traces        nn.Module.training, torch.rand, nn.Module.__call__, ... as tracing needs them
    thread 2, which traces too    waits until thread 1 has finished
    thread 3, which does not      what torch has: each patch asks at once which thread calls it

torch.fx patches `nn.Module.__call__` and `nn.Module.__getattr__` for the whole process; here its patches are like ours.
"""

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import fx

from pippy.ir.base.errors import TracingError

_lock = threading.Lock()
_tracing: int | None = None  # the thread that traces
_suspended = False  # that thread runs something that is not to be traced


def is_tracing() -> bool:
    """Whether this thread is the one that traces."""
    return _tracing == threading.get_ident() and not _suspended


@contextmanager
def not_tracing() -> Iterator[None]:
    """A context in which the thread that traces has what torch has, as other threads do."""
    global _suspended
    before, _suspended = _suspended, True
    try:
        yield
    finally:
        _suspended = before


@contextmanager
def tracing_thread() -> Iterator[None]:
    """Make this thread the one that traces. Others wait here. Inside, the patches of torch.fx act in this thread only."""
    global _tracing
    if _tracing == threading.get_ident():
        raise TracingError(
            "forward() makes a Pipe while it is traced itself; make that Pipe before, outside of forward, and keep it"
        )
    with _lock:
        _tracing = threading.get_ident()
        try:
            with patch.object(fx._symbolic_trace, "_Patcher", _Patcher):
                yield
        finally:
            _tracing = None


@contextmanager
def patched_here(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """``owner.name`` replaced for the thread that traces; other threads call what was there before."""
    with patch.object(owner, name, _Choice(getattr(owner, name), replacement)):
        yield


@contextmanager
def method_patched_here(owner: type, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Like `patched_here`, for a method of a class, or a class method."""
    original = inspect.getattr_static(owner, name)
    if is_class_method(original):
        patched: Any = classmethod(_in_this_thread(class_method(original), replacement))
    else:
        patched = _in_this_thread(original, replacement)
    with patch.object(owner, name, patched):
        yield


def is_class_method(attribute: Any) -> bool:
    """Whether an attribute, as it lies in the dictionary of a class, is a class method, in Python or in C.

    >>> is_class_method(dict.__dict__["fromkeys"]), is_class_method(dict.__dict__["items"])
    (True, False)
    """
    return isinstance(attribute, (classmethod, types.ClassMethodDescriptorType))


def class_method(attribute: Any) -> Callable[..., Any]:
    """A class method, as it lies in the dictionary of a class, as a function whose first argument is the class.

    >>> class_method(dict.__dict__["fromkeys"])(dict, "ab")
    {'a': None, 'b': None}
    """
    if isinstance(attribute, classmethod):
        return attribute.__func__
    return lambda cls, *args, **kwargs: attribute.__get__(None, cls)(*args, **kwargs)


def _in_this_thread(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (replacement if is_tracing() else original)(*args, **kwargs)

    return choose


class _Choice:
    """What stands in for a function or a class, which may be asked `isinstance(x, it)` too."""

    def __init__(self, original: Any, replacement: Callable[..., Any]) -> None:
        self.original, self.replacement = original, replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.replacement if is_tracing() else self.original)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.original)


class _Patcher(fx._symbolic_trace._Patcher):
    """The patches of torch.fx, in the thread that traces only."""

    def patch_method(self, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        original = getattr(cls, name)
        super().patch_method(cls, name, _in_this_thread(original, new_fn) if is_tracing() else new_fn, deduplicate)


# A method of one tracer, replaced while it traces. Several may replace the same one, each around what was there before.


@contextmanager
def replaced(tracer: fx.Tracer, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which the tracer's method ``name`` is ``function``."""
    attributes = vars(tracer)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = function
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)
