"""Memory that forward changes in ways that tracing does not see: buffers that it assigns, and tensors that share memory.

The value of an assigned buffer is written into the buffer, which stays the same tensor:

    in forward                                     in the graph
    ──────────────────────────────────────────────────────────────────────────────────
    y = x - self.mean                              mean = get_attr("mean")
                                                   before = own_copy(mean)
                                                   y = x - before
    self.mean = 0.9 * self.mean + y.mean()         new = 0.9 * before + y.mean()
    return y * self.mean                           result = y * new
                                                   assign_(mean, new, "mean")

What was read before has the numbers of before, also in the backward. Gradients flow through the new value in this call, and
through the buffer into no other. `write_early` moves `assign_` to where the value is made.

A module without a mark inside is kept whole instead, if it is not known that the value has the shape and the dtype of the
buffer: then the module assigns its buffer itself.

Tensors that share memory, and that tracing took for tensors of their own, are connected where forward changes that memory:

    c = torch.tensor([1.0, 2.0])        while forward is traced, `c` and `c[0]` are tensors, and no nodes
    c[0].add_(1)                        _tensor_constant0, of one number, is changed
    return x + c                        _tensor_constant1, of two numbers, is another tensor

After `connect_views` the first is a view of the second in the graph, so all passes know who sees the change. A tensor in a list
of the model's is no different.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.base.names import named_state
from pippy.ir.base.node_notes import ROW_SIZES, copy_notes, copy_place
from pippy.ir.base.source import excerpt_of
from pippy.ir.base.trees import UNKNOWN
from pippy.ir.call.row_sizes import RowDim
from pippy.ir.cut.effects import find_mutations
from pippy.ir.cut.uses import is_constant
from pippy.ir.record.compiled import Traced
from pippy.ir.run.checkpointed_parts import is_begin, is_end
from pippy.ir.run.functions import assign_, difference_from, own_copy
from pippy.ir.run.in_place import memory_of
from pippy.ir.trace.left_as_it_was import Attributes, changes_in_place
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


def connect_views(traced: Traced) -> None:
    """Make views in the graph of the tensors that share memory which forward changes in place."""
    families = [family for family in _nodes_by_memory(traced) if len({node.target for node in family}) > 1]
    if not families:
        return
    mutations, _ = find_mutations(traced.graph, traced.attributes)
    changes = {mutation.root: mutation.node for mutation in reversed(mutations)}
    for family in families:
        change = next((changes[node] for node in family if node in changes), None)
        if change is not None:
            _make_views(traced, family, change)
    traced.graph.lint()


def _nodes_by_memory(traced: Traced) -> Iterator[list[fx.Node]]:
    """The nodes that get tensors of one memory."""
    families: dict[int, list[fx.Node]] = {}
    for node in traced.graph.find_nodes(op="get_attr"):
        memory = memory_of(traced.attributes[str(node.target)])
        if memory is not None:
            families.setdefault(memory, []).append(node)
    yield from families.values()


def _make_views(traced: Traced, family: list[fx.Node], change: fx.Node) -> None:
    tensors = {str(node.target): traced.attributes[str(node.target)] for node in family}
    state = {name for name, _ in named_state(traced.model)}
    base_name = min(
        (name for name in tensors if _is_whole(tensors[name])), key=lambda name: name not in state, default=""
    )
    kinds = {(tensor.dtype, tensor.is_conj(), tensor.is_neg()) for tensor in tensors.values()}
    if len(kinds) > 1 or (not base_name and any(tensor.requires_grad for tensor in tensors.values())):
        if any(map(is_constant, family)):
            raise TracingError(
                "forward() changes a constant in place, through a view of another dtype or a conjugated one. This cannot be "
                "recorded:\n"
                f"{excerpt_of(change)}\nWhat to do: make the constant with the changed numbers, or keep it in a buffer"
            )
        return  # they share their memory in a stage, too; to cut them apart is refused by a constraint
    if not base_name:
        base_name = _put_whole(traced, next(iter(tensors.items())))
    for node in family:
        if node.target != base_name and node.target not in state:
            _make_view(traced.graph, node, base_name, tensors[str(node.target)])


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory, in order."""
    return (
        tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()
    )


def _put_whole(traced: Traced, part: tuple[str, torch.Tensor]) -> str:
    """Add a tensor of all the memory that ``part`` is of. By its name it is a constant if that is one."""
    name, tensor = part
    storage = tensor.untyped_storage()
    base_name = f"{name}_whole"
    traced.attributes[base_name] = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, 0, (storage.nbytes() // tensor.itemsize,), (1,)
    )
    return base_name


def _make_view(graph: fx.Graph, node: fx.Node, base_name: str, tensor: torch.Tensor) -> None:
    with graph.inserting_before(node):
        base = graph.create_node("get_attr", base_name)
        view = graph.call_function(torch.as_strided, (base, *_geometry(tensor)))
    copy_notes(base, node)
    copy_notes(view, node)
    node.replace_all_uses_with(view)
    graph.erase_node(node)


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


# Moves the writing of buffers that forward assigns to where their values are made, so that it is in the same stage.


def write_early(traced: Traced) -> None:
    """Put each `assign_` behind its value, behind the copy of what the buffer was, and behind all that changes the value."""
    writes = traced.graph.find_nodes(op="call_function", target=assign_)
    if not writes:
        return
    mutations, roots = find_mutations(traced.graph, traced.attributes)
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    for write in writes:
        buffer, value = write.all_input_nodes
        changes = [each.node for each in mutations if each.root in roots[value] and each.node not in writes]
        copies = [user for user in buffer.users if user not in writes]
        after = [*changes, *copies, *write.all_input_nodes]
        max((each for each in after if each.op != "placeholder"), key=order.__getitem__).append(write)
    traced.graph.lint()
