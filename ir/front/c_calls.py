"""Python tells of each call of a C function that forward makes while it is traced, under whatever name."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import fx

from pippy.ir import source
from pippy.ir.front.replaced import replaced

_OWNERS = (random.Random, torch.Generator, ModuleType)  # of the functions that a check may be for


@contextmanager
def watching_c_calls(tracer: fx.Tracer, check: Callable[[Any, FrameType], None]) -> Iterator[None]:
    """A context in which ``check(function, frame)`` runs before each call in this thread, and may raise."""
    before: Any = sys.getprofile()
    if before is not None and not callable(before):  # cProfile
        source.warn(
            "a profiler is on, so tracing does not notice random numbers that forward() draws, nor questions for modes of torch"
        )
        yield
        return

    def on_event(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and isinstance(getattr(function, "__self__", None), _OWNERS):
            check(function, frame)

    def on_event_too(frame: FrameType, event: Any, function: Any) -> None:
        before(frame, event, function)
        on_event(frame, event, function)

    watch = on_event if before is None else on_event_too
    sys.setprofile(watch)
    try:
        with paused_for_nodes(tracer, lambda: sys.setprofile(before), lambda: sys.setprofile(watch)):
            yield
    finally:
        sys.setprofile(before)


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
