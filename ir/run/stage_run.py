"""Running one stage: on leaves that it has for itself, and with errors that name the stage and the user's line.

Objects that are neither tensors nor containers pass from stage to stage as constants. A tensor inside one would keep its
gradient in one process and lose it between two, so none may require a gradient: `check_opaque`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base import source
from pippy.ir.base.errors import StageError
from pippy.ir.base.marks import ON_SPLIT
from pippy.ir.base.node_notes import SOURCE
from pippy.ir.base.trees import describe, leaves, map_leaves
from pippy.ir.run.in_place import changed_since
from pippy.ir.run.stage_backward import stage_backward

Backward = Callable[[Any, Any, Sequence[Any]], tuple[Any, ...]]

_UNSEEN_MARK = (
    "{} calls pipe_split() inside a module that tracing did not look into, so nothing was cut there; use a tracer whose "
    "is_leaf_module says False for that module"
)


@dataclass
class StageRun:
    """One call of a stage: its outputs, or what `edges_of` leaves of them, and the leaves that it was called with, in the order
    of the node's arguments."""

    outputs: Any
    inputs: tuple[Any, ...]


def as_leaf(value: Any) -> Any:
    """A value detached from the graph that made it. Each stage that uses it takes a leaf, so no gradient is counted twice."""
    return _leaf(value) if type(value) is torch.Tensor else map_leaves(_leaf, value)


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value if value.layout is not torch.strided or value.is_contiguous() else _dense(value)
        return value.detach().requires_grad_() if value.requires_grad else value
    if not isinstance(value, CONSTANTS):
        check_opaque(value)
    return value


def _dense(value: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps or repetitions in memory, as it would arrive from another process.

    For other strides a kernel may round differently, and a Pipe computes the same bits wherever its stages are.
    """
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(value.stride(), value.shape) if size != 1):
        if stride != step:
            return value.contiguous()
        step *= size
    return value


def run_stage(name: str, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """Call a stage. If it raises, raise a `StageError` that names the stage, its inputs and the user's line."""
    grad_mode = torch.is_grad_enabled()
    before = ON_SPLIT.set(lambda: source.warn(_UNSEEN_MARK.format(name)))
    try:
        return nn.Module.__call__(module, *args, **(kwargs or {}))  # GraphModule.__call__ drops the traceback
    except Exception as error:
        raise StageError(_explained("forward", name, module, args, error)) from error
    finally:
        ON_SPLIT.reset(before)
        if torch.is_grad_enabled() != grad_mode:  # the stage may have raised under torch.no_grad()
            torch.set_grad_enabled(grad_mode)


def run_backward(
    name: str, module: nn.Module, run: StageRun, output_grads: Any, backward: Backward = stage_backward
) -> tuple[Any, ...]:
    """Call `stage_backward`, or another ``backward``, for an earlier run of a stage. Errors are as those of `run_stage`."""
    try:
        return backward(run.outputs, output_grads, run.inputs)
    except Exception as error:
        raise StageError(_explained("backward", name, module, run.inputs, error, run.outputs, output_grads)) from error


def _explained(
    direction: str, name: str, module: nn.Module, inputs: Sequence[Any], error: Exception, *outputs_and_grads: Any
) -> str:
    lines = [f"{direction} of {name} failed: {type(error).__name__}: {error}", *_where(module, error, direction)]
    lines.append(f"inputs: {', '.join(map(describe, inputs)) or 'none'}")
    lines += [f"{what}: {describe(value)}" for what, value in zip(("outputs", "their gradients"), outputs_and_grads)]
    if "a leaf Variable that requires grad is being used in an in-place operation" in str(error):
        lines.append(
            "the stage changes one of its inputs in place inside a module that tracing did not look into; "
            "use the operation that makes a new tensor there"
        )
    changed = changed_since(module, error)
    lines += [changed] if changed else []
    return "\n".join(lines)


def _where(module: nn.Module, error: Exception, direction: str) -> Iterator[str]:
    """The user's lines that ``error`` comes from."""
    if not isinstance(module, fx.GraphModule):
        return
    node = _failing_node(module, error.__traceback__)
    if direction == "backward" and node is None:  # else it ran a checkpointed part once more
        spans = list(filter(None, map(SOURCE.of, module.graph.nodes)))
        if spans:
            yield f"the stage was made from the lines between\n{spans[0].excerpt()}\nand\n{spans[-1].excerpt()}"
        return
    if node is not None:
        yield source.excerpt_of(node)
    inner = source.of_traceback(error.__traceback__, below="forward")
    if inner is not None:
        yield f"raised in\n{inner.excerpt()}"


def _failing_node(module: fx.GraphModule, traceback: TracebackType | None) -> fx.Node | None:
    """The node whose line of generated code the traceback passes through: the innermost, in a checkpointed part."""
    lines = getattr(module, "_lineno_map", None) or {}
    nodes = list(module.graph.nodes)
    index = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == type(module).forward.__code__.co_filename:
            index = lines.get(traceback.tb_lineno - getattr(module, "_prologue_start", 0))
        traceback = traceback.tb_next
    return nodes[index] if index is not None else None


CONSTANTS = (str, bytes, bool, int, float, complex, type(None), torch.Size, torch.dtype, torch.device, slice, range)
_WITHOUT_VALUES = (*CONSTANTS, type, FunctionType, MethodType, ModuleType)


def check_opaque(value: Any) -> None:
    """Raise if a tensor somewhere inside an object requires a gradient.

    >>> check_opaque(object())
    """
    hidden = [name for name, tensor in _tensors(value) if tensor.requires_grad]
    if hidden:
        raise StageError(
            f"a {type(value).__name__} passes from stage to stage and holds tensors that require a gradient, in "
            f"{hidden}, which the pipeline cannot see; make it a dataclass, a tuple or a dict, or register it with "
            "torch.utils._pytree.register_pytree_node"
        )


def check_opaque_leaves(value: Any) -> None:
    """`check_opaque` for all objects in a value."""
    for leaf in leaves(value):
        if not isinstance(leaf, (torch.Tensor, *CONSTANTS)):
            check_opaque(leaf)


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that an object refers to, through attributes, lists, dicts and other objects, with the way to each."""
    seen, pending = {id(value)}, list(_items(value, ""))
    while pending:
        name, item = pending.pop(0)
        if isinstance(item, torch.Tensor):
            yield name, item
        elif id(item) not in seen and not isinstance(item, _WITHOUT_VALUES):
            seen.add(id(item))
            pending += _items(item, name)


def _items(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((name, item) for item in value)
    slots = [slot for kind in type(value).__mro__ for slot in _slots(kind) if hasattr(value, slot)]
    attributes = {**{slot: getattr(value, slot) for slot in slots}, **getattr(value, "__dict__", {})}
    yield from ((f"{name}.{key}" if name else str(key), item) for key, item in attributes.items())


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
