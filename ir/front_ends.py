"""Which front end traces a model.

    front_end       without an example      with one
    ────────────────────────────────────────────────────────────────────────────────────────────────────
    None, "auto"    torch.fx                torch.fx, and torch.export where that cannot follow the model
    "fx"            torch.fx                torch.fx
    "export"        refused                 torch.export

An error that is not of the front end is raised at once: a mark on a module that forward does not call, an operation that fails
for the example, and what `torch.export` would lose (autocast, random numbers of Python, `x is y`).
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from pippy.ir.base.brief import brief
from pippy.ir.base.errors import PippyError, TracingError
from pippy.ir.record.compiled import Compiled
from pippy.ir.trace.arguments import Example
from pippy.ir.trace.returned_caches import CacheReturnedError, calls_without_cache
from pippy.ir.trace.trace import Traced, TracerLike, trace, tracer_of
from pippy.ir.trace.tracer import PipeTracer

_NAMES = (None, "auto", "fx", "export")


@dataclass(frozen=True)
class ModelCall:
    """What a front end takes: a model, and a call of it."""

    model: nn.Module
    tracer: TracerLike | None = None
    concrete_args: Mapping[str, Any] | None = None
    example: Example | None = None


def trace_and_compile(
    call: ModelCall, front_end: str | None, compile: Callable[[Traced], Compiled]
) -> tuple[Traced, Compiled]:
    """Trace a model by the front end that is asked for, or by the one that can, and ``compile`` the graph."""
    if front_end not in _NAMES:
        raise TracingError(f"front_end is {brief(front_end)}; give 'fx' or 'export', or 'auto', the default")
    first, *others = calls_without_cache(call.model, call.example, call.concrete_args)
    try:
        return _trace_and_compile(replace(call, example=first), front_end, compile)
    except CacheReturnedError:
        for other in others:
            with suppress(PippyError):  # a forward that takes no such argument after all
                return _trace_and_compile(replace(call, example=other), front_end, compile)
        raise


def _trace_and_compile(
    call: ModelCall, front_end: str | None, compile: Callable[[Traced], Compiled]
) -> tuple[Traced, Compiled]:
    if front_end == "export":
        return _by_export(call, compile)
    try:
        traced = trace(call.model, call.tracer, call.concrete_args, call.example)
        return traced, compile(traced)
    except PippyError as error:
        if front_end == "fx" or not error.another_front_end_may or call.example is None or _is_own(call.tracer):
            raise
        return _instead(call, compile, error)


def _by_export(call: ModelCall, compile: Callable[[Traced], Compiled]) -> tuple[Traced, Compiled]:
    from pippy.ir.export.trace import trace_export  # it imports torch.export, which takes a second

    traced = trace_export(call.model, call.tracer, call.concrete_args, call.example)
    compiled = compile(traced)
    compiled.front_end = "export"
    return traced, compiled


def _instead(call: ModelCall, compile: Callable[[Traced], Compiled], first: PippyError) -> tuple[Traced, Compiled]:
    """By torch.export, since torch.fx could not. If that fails too, the error has both reasons, unless they are the same."""
    try:
        traced, compiled = _by_export(call, compile)
    except Exception as second:
        if _is_same(first, second):
            raise first from first.__cause__
        what = str(second) if isinstance(second, PippyError) else f"{type(second).__name__}: {second}"
        raise type(first)(f"{first}\nWith torch.export, which follows other models, it fails, too:\n{what}") from first
    compiled.why_export = _short(first)
    return traced, compiled


def _is_own(tracer: TracerLike | None) -> bool:
    """Whether a tracer of the user's does more than to choose leaves: torch.export would not."""
    if tracer is None:
        return False
    kinds = type(tracer_of(tracer)).__mro__
    known = next(kind for kind in kinds if kind in (PipeTracer, fx.Tracer))
    own = {name for kind in kinds[: kinds.index(known)] for name in vars(kind)}
    return not own <= {"is_leaf_module", "__init__", "__module__", "__doc__", "__dict__", "__weakref__"}


def _is_same(first: Exception, second: Exception) -> bool:
    """Whether both front ends met the same error of the user's forward."""
    causes = first.__cause__, second.__cause__
    return None not in causes and type(causes[0]) is type(causes[1]) and str(causes[0]) == str(causes[1])


def _short(error: PippyError) -> str:
    """The first lines of an error: what failed, and the place in the user's code."""
    what, *rest = str(error).split("\n")
    place = next((line.strip() for line in rest if line.startswith("  ")), "")
    return f"{what} ({place})" if place else what
