"""Python tells of each call that forward makes while it is traced, under whatever name: before it, and of C functions after it.

So a check can refuse a call of a C function, a function of the user's can be prepared when it begins, and it is known which C
function a line calls just now: `isinstance(x, int)` and `torch.relu(x)` both ask `x` for its class, and only one is answered.
"""

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import fx

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.trace.tracing_thread import replaced

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
