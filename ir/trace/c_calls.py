"""Python tells of each call that forward makes while it is traced, under whatever name: before it, and of C functions after it.

So a check can refuse a call of a C function, a function of the user's can be prepared when it begins, and it is known which C
function a line calls just now: `isinstance(x, int)` and `torch.relu(x)` both ask `x` for its class, and only one is answered.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import fx

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.trace.replaced import replaced

_OWNERS = (random.Random, torch.Generator, ModuleType)  # of the functions that a check may be for


class CallWatch:
    """What tells of the calls, in one thread. It can be paused."""

    def __init__(self, check: Callable[[Any, FrameType], None], begins: Callable[[FrameType], None] | None) -> None:
        self._check, self._begins, self._before = check, begins, sys.getprofile()
        self._told = self._on_event if self._before is None else self._on_event_too
        self._calls: list[tuple[FrameType, Any]] = []  # that have not returned

    def resume(self) -> None:
        sys.setprofile(self._told)

    def pause(self) -> None:
        """Leave the profiler that was there before."""
        sys.setprofile(self._before)

    def called_by(self, frame: FrameType) -> Any:
        """The C function that a frame calls just now; None if it calls none."""
        return self._calls[-1][1] if self._calls and self._calls[-1][0] is frame else None

    def _on_event(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            if self._begins is not None:
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
    check: Callable[[Any, FrameType], None],
    tracer: fx.Tracer | None = None,
    begins: Callable[[FrameType], None] | None = None,
) -> Iterator[None]:
    """A context in which ``check(function, frame)`` runs before each call of a C function in this thread, and may raise, and
    ``begins(frame)`` where a function in Python begins. The watch pauses while ``tracer`` makes a node.
    """
    global _watch
    with _pausing_profiler():
        watch, before = CallWatch(check, begins), _watch
        _watch = watch
        watch.resume()
        try:
            with nullcontext() if tracer is None else paused_for_nodes(tracer, watch.pause, watch.resume):
                yield
        finally:
            watch.pause()
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
def paused_for_nodes(tracer: fx.Tracer, pause: Callable[[], None], resume: Callable[[], None]) -> Iterator[None]:
    """A context in which a watch pauses while ``tracer`` makes a node: most calls are in there, and none is the user's."""
    create_proxy = tracer.create_proxy

    def unwatched(*args: Any, **kwargs: Any) -> Any:
        pause()
        try:
            return create_proxy(*args, **kwargs)
        finally:
            resume()

    with replaced(tracer, "create_proxy", unwatched):
        yield
