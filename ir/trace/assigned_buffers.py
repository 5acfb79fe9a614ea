"""Buffers that forward assigns: the value is written into the buffer, which stays the same tensor.

    in forward                                     in the graph
    ──────────────────────────────────────────────────────────────────────────────────
    y = x - self.mean                              mean = get_attr("mean")
                                                   before = own_copy(mean)
                                                   y = x - before
    self.mean = 0.9 * self.mean + y.mean()         new = 0.9 * before + y.mean()
    return y * self.mean                           result = y * new
                                                   assign_(mean, new, "mean")

What was read before has the numbers of before, also in the backward. Gradients flow through the new value in this call, and
through the buffer into no other. `ir/cut/views.py` moves `assign_` to where the value is made.

A module without a mark inside is kept whole instead, if it is not known that the value has the shape and the dtype of the
buffer: then the module assigns its buffer itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.base.node_notes import ROW_SIZES, copy_notes, copy_place
from pippy.ir.base.trees import UNKNOWN
from pippy.ir.call.row_sizes import RowDim
from pippy.ir.run.checkpointed_parts import is_begin, is_end
from pippy.ir.run.functions import assign_, difference_from, own_copy
from pippy.ir.run.shared_tensors import memory_of
from pippy.ir.trace.restore_attributes import Attributes, changes_in_place
from pippy.ir.trace.values import Values, value_of


@dataclass(frozen=True)
class Assigned:
    """A buffer that forward has assigned: its name, the tensor that it was, and the value."""

    name: str
    buffer: Any
    value: Any


def assigned_in(module: nn.Module, path: str, before: Attributes) -> Iterator[Assigned]:
    """The buffers of one module that forward has assigned. After `self.count += 1` the buffer is what it was."""
    for name, value in _buffers(module).items():
        full = f"{path}.{name}".lstrip(".")
        buffer = before.get(full, None)
        if value is not buffer and not (issubclass(type(value), fx.Proxy) and _is_still(value.node, full)):
            yield Assigned(full, buffer, value)


def _buffers(module: nn.Module) -> dict[str, Any]:
    """The buffers of a module that was traced; some are proxies."""
    return {} if isinstance(module, torch.jit.ScriptModule) else dict(module._buffers)


def _is_still(node: fx.Node, name: str) -> bool:
    """Whether a node gives the buffer of that name itself."""
    return (node.op == "get_attr" and node.target == name) or changes_in_place(node, name)


def check_fitting(module: nn.Module, path: str, before: Attributes) -> None:
    """Raise unless each value that a module has assigned to a buffer is known to fit it."""
    for each in assigned_in(module, path, before):
        known = value_of(each.value) if issubclass(type(each.value), fx.Proxy) else UNKNOWN
        why = _why_not(each, known) or ("is not known to have its shape and dtype" if known is UNKNOWN else None)
        if why is not None:
            raise buffer_refusal(each.name, why, _line_of_value(each.value))


def record_assigned(
    model: nn.Module, graph: fx.Graph, before: Attributes, state: Mapping[str, torch.Tensor], values: Values
) -> None:
    """Write into a graph that was traced what forward has assigned to buffers. ``state`` is that of the model before."""
    for buffer in [each for path, module in model.named_modules() for each in assigned_in(module, path, before)]:
        known = values.of(buffer.value.node) if issubclass(type(buffer.value), fx.Proxy) else UNKNOWN
        if (why := _why_not(buffer, known) or _why_not_alone(buffer, state, graph)) is not None:
            raise buffer_refusal(buffer.name, why, _line_of_value(buffer.value))
    for path, module in model.named_modules():
        for name, value in _buffers(module).items():
            if issubclass(type(value), fx.Proxy):
                _write(graph, f"{path}.{name}".lstrip("."), value.node)


def finish_assigned(graph: fx.Graph) -> None:
    """Have what reads a buffer that is assigned read a copy, and drop what assigns a buffer to itself."""
    writes = graph.find_nodes(op="call_function", target=assign_)
    for write in writes:
        buffer, value, name = write.args
        if _is_still(value, name):
            graph.erase_node(write)
            if not buffer.users:
                graph.erase_node(buffer)
    for write in writes:
        if not write._erased:
            _read_copy(graph, write.args[0])


def _write(graph: fx.Graph, name: str, value: fx.Node) -> None:
    buffer = next((each for each in graph.find_nodes(op="get_attr") if each.target == name), None)
    with graph.inserting_before(graph.output_node()):
        buffer = buffer or graph.create_node("get_attr", name)
        made = graph.call_function(assign_, (buffer, value, name))
    copy_place(made, value)


def _read_copy(graph: fx.Graph, buffer: fx.Node) -> None:
    readers = [user for user in buffer.users if user.target is not assign_ or user.args[1] is buffer]
    if readers:
        with graph.inserting_before(next(each for each in graph.nodes if each in buffer.users)):
            copy = graph.call_function(own_copy, (buffer,))
        copy_notes(copy, buffer)
        for user in readers:  # of these, one may assign it to another buffer
            user.replace_input_with(buffer, copy)


def varying_with_rows(graph: fx.Graph) -> Iterator[tuple[str, TracingError]]:
    """The buffers whose new values have another size for another number of rows, and the error for each."""
    for node in graph.find_nodes(op="call_function", target=assign_):
        _, value, name = node.args
        if isinstance(ROW_SIZES.of(value), RowDim):
            yield name, buffer_refusal(name, "has another size for another number of rows", source.excerpt_of(node))


def _why_not(assigned: Assigned, known: Any) -> str | None:
    """Why a value cannot be written into the buffer; None if nothing is ``known`` of it that speaks against that."""
    if not issubclass(type(assigned.value), fx.Proxy):
        return "is None" if assigned.value is None else "is no traced value"
    if not isinstance(assigned.buffer, torch.Tensor):
        return "comes in place of no tensor"
    if known is not UNKNOWN and (difference := difference_from(assigned.buffer, known)) is not None:
        return difference
    return "is computed in a part that is checkpointed, and so twice" if _is_in_part(assigned.value.node) else None


def _is_in_part(node: fx.Node) -> bool:
    """Whether torch.utils.checkpoint runs a node."""
    depth = 0
    for each in node.graph.nodes:
        depth += is_begin(each) - is_end(each)
        if each is node:
            return depth > 0
    return False


def _why_not_alone(assigned: Assigned, state: Mapping[str, torch.Tensor], graph: fx.Graph) -> str | None:
    """Who else would see the buffer change; None if nobody."""
    memory = memory_of(assigned.buffer)
    for name, tensor in state.items():
        if name != assigned.name and memory is not None and memory_of(tensor) == memory:
            return f"is written into memory that is also that of {name!r}, which keeps its numbers in plain PyTorch"
    for node in graph.find_nodes(op="call_module"):
        if f"{assigned.name}.".startswith(f"{node.target}."):
            return f"is for {node.target!r}, which stages call as a whole"
    return None


def buffer_refusal(name: str, why: str, line: str) -> TracingError:
    """The error for a buffer that forward assigns and that cannot be followed."""
    attribute, place = name.rpartition(".")[2], f":\n{line}" if line else ""
    return TracingError(
        f"forward() assigns the buffer {name!r}, and what it assigns {why}{place}\n"
        f"What to do: change the buffer in place, as in self.{attribute}.copy_(...), .add_(...) or +=; or assign it in a "
        "module without a mark inside, which is kept whole"
    )


def _line_of_value(value: Any) -> str:
    return source.excerpt_of(value.node) if issubclass(type(value), fx.Proxy) else ""
