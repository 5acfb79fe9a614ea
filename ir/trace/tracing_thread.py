"""One thread traces at a time, and what tracing patches in torch acts in that thread only.

    thread 1, which traces        nn.Module.training, torch.rand, nn.Module.__call__, ... as tracing needs them
    thread 2, which traces too    waits until thread 1 has finished
    thread 3, which does not      what torch has: each patch asks at once which thread calls it

torch.fx patches `nn.Module.__call__` and `nn.Module.__getattr__` for the whole process; here its patches are like ours.

A forward may catch an error that tracing has raised inside of it, and take another branch: the error is raised again.

Python tells of each call that forward makes, under whatever name: before it, and of C functions after it (`watching_c_calls`).
So a check can refuse a call of a C function, a function of the user's can be prepared when it begins, and it is known which C
function a line calls just now: `isinstance(x, int)` and `torch.relu(x)` both ask `x` for its class, and only one is answered.
"""

import functools
import inspect
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import fx

from pippy.ir.base import source
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


@contextmanager
def then(tracer: fx.Tracer, name: str, follow: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which the tracer's method ``name`` gives what ``follow`` makes of its result."""
    method = getattr(tracer, name)
    with replaced(tracer, name, lambda *args, **kwargs: follow(method(*args, **kwargs))):
        yield


_Error = TypeVar("_Error", bound=Exception)
_seen: ContextVar[list[Exception] | None] = ContextVar("refusals", default=None)


def refused(error: _Error) -> _Error:
    """``error``, which is to be raised, and which ends the trace even if forward catches it."""
    seen = _seen.get()
    if seen is not None:
        seen.append(error)
        error.source = source.of_frame(sys._getframe(1))  # type: ignore[attr-defined]
    return error


@contextmanager
def raising_refusals() -> Iterator[None]:
    """A context at whose end the first error that was caught inside is raised."""
    seen: list[Exception] = []
    token = _seen.set(seen)
    try:
        yield
    finally:
        _seen.reset(token)
    if seen:
        raise seen[0]


@contextmanager
def forgiving() -> Iterator["Forgiving"]:
    """A context that knows which refusals were raised inside, also if forward caught them, and can take them back."""
    seen = _seen.get()
    yield Forgiving([] if seen is None else seen)


class Forgiving:
    """The refusals of a region."""

    def __init__(self, seen: list[Exception]) -> None:
        self._seen, self._before = seen, len(seen)

    def raise_caught(self) -> None:
        """Raise the first refusal of the region, which forward has caught."""
        if len(self._seen) > self._before:
            raise self._seen[self._before]

    def forgive(self) -> None:
        """Let the trace go on, as if nothing in the region had been refused."""
        del self._seen[self._before :]


_OWNERS = (random.Random, torch.Generator, ModuleType)  # of the functions that a check may be for


class CallWatch:
    """What tells of the calls, in one thread. It can be paused."""

    def __init__(self, check: Callable[[Any, FrameType], None], begins: Callable[[FrameType], None]) -> None:
        self._check, self._begins, self._before, self.is_on = check, begins, sys.getprofile(), False
        self._told = self._on_event if self._before is None else self._on_event_too
        self._calls: list[tuple[FrameType, Any]] = []  # that have not returned

    def resume(self) -> None:
        self.is_on = True
        sys.setprofile(self._told)

    def pause(self) -> None:
        """Leave the profiler that was there before."""
        sys.setprofile(self._before)
        self.is_on = False

    def called_by(self, frame: FrameType) -> Any:
        """The C function that a frame calls just now; None if it calls none."""
        return self._calls[-1][1] if self._calls and self._calls[-1][0] is frame else None

    def _on_event(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            self._begins(frame)
        elif event == "c_call":
            if isinstance(getattr(function, "__self__", None), _OWNERS):
                self._check(function, frame)
            if function is not sys.setprofile:
                self._calls.append((frame, function))
        elif event != "return":
            self._forget(frame)

    def _forget(self, frame: FrameType) -> None:
        """A call of a C function has ended, and so have those within that returned while the watch paused."""
        for at in reversed(range(len(self._calls))):
            if self._calls[at][0] is frame:
                del self._calls[at:]
                return

    def _on_event_too(self, frame: FrameType, event: Any, function: Any) -> None:
        assert self._before is not None
        self._before(frame, event, function)
        self._on_event(frame, event, function)


_watch: CallWatch | None = None  # of the thread that traces


def called_by(frame: FrameType) -> Any:
    """The C function that a frame of the trace calls just now; None if it calls none."""
    return None if _watch is None else _watch.called_by(frame)


@contextmanager
def watching_c_calls(
    tracer: fx.Tracer, check: Callable[[Any, FrameType], None], begins: Callable[[FrameType], None]
) -> Iterator[None]:
    """A context in which, while ``tracer`` runs forward, ``check(function, frame)`` runs before each C function, and
    may raise, and ``begins(frame)`` where a function in Python begins. The watch pauses while ``tracer`` makes a node.
    """
    global _watch
    with _pausing_profiler():
        watch, before = CallWatch(check, begins), _watch
        _watch = watch
        try:
            with _resumed_in_forward(tracer, watch), _paused_for_nodes(tracer, watch):
                yield
        finally:
            _watch = before


@contextmanager
def _pausing_profiler() -> Iterator[None]:
    """A context in which a profiler that is no function, cProfile's, does not run: Python has room for one."""
    profiler: Any = sys.getprofile()
    if profiler is None or callable(profiler):
        yield
        return
    if not hasattr(profiler, "disable"):
        raise TracingError(
            "tracing needs Python's profiling hook, but a profiler that cannot be paused uses it, a "
            f"{type(profiler).__name__}; stop the profiler before pipeline()"
        )
    source.warn("a profiler is on; it is paused while forward is traced")
    profiler.disable()
    try:
        yield
    finally:
        profiler.enable()


@contextmanager
def _resumed_in_forward(tracer: fx.Tracer, watch: CallWatch) -> Iterator[None]:
    """A context in which forward is watched. What torch.fx replaces before it, and puts back, is many calls of its own."""
    create_args_for_root = tracer.create_args_for_root

    def create_args(*given: Any, **named: Any) -> Any:
        forward, arguments = create_args_for_root(*given, **named)

        @functools.wraps(forward)
        def watched(*args: Any) -> Any:
            watch.resume()
            try:
                return forward(*args)
            finally:
                watch.pause()

        return watched, arguments

    with replaced(tracer, "create_args_for_root", create_args):
        yield


@contextmanager
def _paused_for_nodes(tracer: fx.Tracer, watch: CallWatch) -> Iterator[None]:
    """A context in which a watch pauses while ``tracer`` makes a node: most calls are in there, and none is the user's."""
    create_proxy = tracer.create_proxy

    def unwatched(*args: Any, **kwargs: Any) -> Any:
        if not watch.is_on:  # forward has not begun, or a node is made for another
            return create_proxy(*args, **kwargs)
        watch.pause()
        try:
            return create_proxy(*args, **kwargs)
        finally:
            watch.resume()

    with replaced(tracer, "create_proxy", unwatched):
        yield
