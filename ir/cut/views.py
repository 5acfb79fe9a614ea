"""Connects tensors that share memory, and that tracing took for tensors of their own, where forward changes that memory.

    c = torch.tensor([1.0, 2.0])        while forward is traced, `c` and `c[0]` are tensors, and no nodes
    c[0].add_(1)                        _tensor_constant0, of one number, is changed
    return x + c                        _tensor_constant1, of two numbers, is another tensor

After this pass the first is a view of the second in the graph, so all passes know who sees the change. A tensor in a list
of the model's is no different.
"""

from collections.abc import Iterator

import torch
from torch import fx

from pippy.ir.base.errors import TracingError
from pippy.ir.base.names import named_state
from pippy.ir.base.node_notes import copy_notes
from pippy.ir.base.source import excerpt_of
from pippy.ir.cut.effects import find_mutations
from pippy.ir.cut.uses import is_constant
from pippy.ir.record.traced import Traced
from pippy.ir.run.functions import assign_
from pippy.ir.run.shared_tensors import memory_of


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
