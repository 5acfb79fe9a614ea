"""Records the calls of `torch.utils.checkpoint`: what the function computes lies between two nodes, see checkpointed_parts.py.

A mark at the very beginning or end of a part cuts before or after the part. One inside is refused when the model is cut.
"""

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint
from torch import fx

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.base.marks import pipe_split
from pippy.ir.base.node_notes import SOURCE, SourceLine
from pippy.ir.base.without_dynamo import import_no_dynamo
from pippy.ir.run.checkpointed_parts import REENTRANT, BeginPart, begin_part, end_part, is_begin, is_end, parts_of
from pippy.ir.trace.tracing_thread import patched_here, refused

_DEFAULTS: dict[str, Any] = {
    "preserve_rng_state": True,
    "determinism_check": "default",
    "debug": False,
    "early_stop": True,
}
_POSITIONAL = "_checkpoint_without_reentrant_generator"  # in torch 2.13; later, another one takes its arguments by name
_torchs: Any = torch.utils.checkpoint
GENERATOR = f"{_POSITIONAL}_impl" if hasattr(_torchs, f"{_POSITIONAL}_impl") else _POSITIONAL
"""The name of the function of torch that encloses a call with ``use_reentrant=False``."""


@contextmanager
def recording_checkpoints(tracer: fx.Tracer) -> Iterator[None]:
    """A context in which ``tracer`` records the calls with ``use_reentrant=False``."""

    before = _forced()

    def record(args: Any, context_fn: Any, **options: Any) -> Iterator[None]:
        # torch runs the function between the two steps of its generator.
        options.update({name: value for name, value in _forced().items() if value != before[name]})
        begin = _begin(tracer, args, False, options, context_fn)
        yield
        tracer.create_proxy("call_function", end_part, (begin,), {}, name="checkpoint")

    def positional(_: Any, preserve: Any, context_fn: Any, *args: Any, **__: Any) -> Iterator[None]:
        check, debug, early_stop, *rest = args
        options = {"determinism_check": check, "debug": debug, "early_stop": early_stop}
        return record(rest, context_fn, preserve_rng_state=preserve, **options)

    def by_name(_: Any, args: Any, __: Any, **options: Any) -> Iterator[None]:
        return record(args, **options)

    import_no_dynamo(_torchs.checkpoint)  # which is slow, and slower while tracing
    with patched_here(_torchs, GENERATOR, positional if GENERATOR == _POSITIONAL else by_name):
        yield


def _forced() -> dict[str, bool | None]:
    """The options that a region says for all calls in it; None if it does not."""
    return {"debug": _torchs._checkpoint_debug_enabled, "early_stop": _torchs._enable_checkpoint_early_stop}


def record_reentrant(tracer: fx.Tracer, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Record a call with ``use_reentrant=True``, in place of the `apply` of torch's autograd function."""
    begin = _begin(tracer, args, True, {"preserve_rng_state": preserve}, _torchs.noop_context_fn)
    result = _tracked(function(*args))
    end: Any = tracer.create_proxy("call_function", end_part, (begin, result), {}, name="checkpoint")
    if not isinstance(result, tuple):
        return end if _is_proxy(result) else result
    return tuple([end[index] if _is_proxy(each) else each for index, each in enumerate(result)])


def _begin(tracer: fx.Tracer, args: Any, reentrant: bool, options: dict[str, Any], context_fn: Any) -> fx.Proxy:
    has_context = context_fn is not _torchs.noop_context_fn
    changed = {name: value for name, value in options.items() if value != _DEFAULTS.get(name)}
    if changed.get("determinism_check", "none") not in _torchs._allowed_determinism_checks_to_fns:
        raise _refusal(f"torch.utils.checkpoint knows no determinism_check={changed['determinism_check']!r}", _here())
    if has_context and any(map(_is_proxy, _bound(context_fn))):
        raise _refusal(
            "the context_fn of torch.utils.checkpoint uses a traced value, which it cannot have when it runs; let it use "
            "constants and modules alone",
            _here(),
        )
    return tracer.create_proxy(
        "call_function",
        BeginPart(context_fn) if has_context else begin_part,
        tuple({id(each): each for each in args if _is_proxy(each)}.values()),
        {REENTRANT: reentrant, **changed},
        name="part",
    )


def _bound(function: Any) -> list[Any]:
    """What a function has from where it was made."""
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), *_bound(function.func)]
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _here() -> SourceLine | None:
    return source.of_frame(sys._getframe(1))


def _is_proxy(value: Any) -> bool:
    return issubclass(type(value), fx.Proxy)


def _tracked(result: Any) -> Any:
    """What a reentrant part returns, if autograd will know of every tensor in it."""
    for item in result if isinstance(result, tuple) else (result,):
        inner: list[Any] = []
        if not _is_proxy(item):
            fx.node.map_aggregate(item, inner.append)
        if any(map(_is_proxy, inner)):
            raise _refusal(
                f"a function that torch.utils.checkpoint runs with use_reentrant=True returns a {type(item).__name__} of "
                "tensors, which would have no gradients. Return a tensor or a tuple of tensors, or say use_reentrant=False",
                _here(),
            )
    return result


def _refusal(message: str, where: SourceLine | None) -> TracingError:
    return refused(TracingError(message + (f"\n{where.excerpt()}" if where else "")))


def finish_parts(graph: fx.Graph) -> None:
    """Check what leaves the checkpointed parts of a graph that was traced, and move marks at their edges out of them."""
    for part in parts_of(list(graph.nodes)):
        leaked = next((node for node in part.outputs() if part.is_reentrant and node.op.startswith("call_")), None)
        if leaked is not None:
            raise _refusal(
                "a function that torch.utils.checkpoint runs with use_reentrant=True computes a value that is used outside "
                "without being returned, so it would have no gradient. Return it, or say use_reentrant=False",
                SOURCE.of(leaked),
            )
    _move_marks(graph)


def _move_marks(graph: fx.Graph) -> None:
    for mark in graph.find_nodes(op="call_function", target=pipe_split):
        while True:
            before, after = _operation(mark, "prev"), _operation(mark, "next")
            if is_begin(before):
                before.prepend(mark)
            elif is_end(after):
                _last_of(after).append(mark)
            else:
                break


def _operation(node: fx.Node, side: str) -> fx.Node:
    """The next operation on one side of a mark; the graph's root if there is none."""
    node = getattr(node, side)
    while node.op in ("get_attr", "placeholder") or node.target is pipe_split:
        node = getattr(node, side)
    return node


def _last_of(end: fx.Node) -> fx.Node:
    """The last of the nodes that unpack what a part returns."""
    last = end
    while last.next.target is operator.getitem and last.next.args[0] is end:
        last = last.next
    return last
