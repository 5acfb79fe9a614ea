"""Python tells of each call of a C function that forward makes while it is traced, under whatever name."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import fx

from pippy.ir import source
from pippy.ir.front.replaced import replaced

_OWNERS = (random.Random, torch.Generator, ModuleType)  # of the functions that a check may be for


class Watch:
    """What tells of the calls, in one thread. It can be paused."""

    def __init__(self, check: Callable[[Any, FrameType], None]) -> None:
        self._check, self._before = check, sys.getprofile()
        self._told = self._on_event if self._before is None else self._on_event_too

    def resume(self) -> None:
        sys.setprofile(self._told)

    def pause(self) -> None:
        """Leave the profiler that was there before."""
        sys.setprofile(self._before)

    def _on_event(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and isinstance(getattr(function, "__self__", None), _OWNERS):
            self._check(function, frame)

    def _on_event_too(self, frame: FrameType, event: Any, function: Any) -> None:
        assert self._before is not None
        self._before(frame, event, function)
        self._on_event(frame, event, function)


@contextmanager
def watching_c_calls(check: Callable[[Any, FrameType], None], tracer: fx.Tracer | None = None) -> Iterator[None]:
    """A context in which ``check(function, frame)`` runs before each call in this thread, and may raise.

    The watch pauses while ``tracer`` makes a node.
    """
    before: Any = sys.getprofile()
    if before is not None and not callable(before):  # cProfile
        source.warn(
            "a profiler is on, so tracing does not notice random numbers that forward() draws, nor questions for modes of torch"
        )
        yield
        return
    watch = Watch(check)
    watch.resume()
    try:
        with nullcontext() if tracer is None else paused_for_nodes(tracer, watch.pause, watch.resume):
            yield
    finally:
        watch.pause()


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
