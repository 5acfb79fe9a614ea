"""A piece that adds gradients of parameters up itself: each one right after it was computed, while it is in the caches.

    grad = mm(...)                 grad = mm(...)
    ...                     ─▶     sum_of_weight.add_(grad)          a sum is one more input
    return [..., grad]             ...
                                   return [..., None]

Small gradients stay outputs: one operation adds up many of them. A compiler has nothing to gain from a product that goes into
a sum, but would compute it into other memory than the sum's: `without_sums` parts it from the rest.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from pippy.ir.base.node_notes import FAKE_VALUE
from pippy.ir.halves.joint import storage_of, written_by
from pippy.ir.halves.pieces import Piece, TakesAList, piece_of

_WORTH_IT = 1 << 18  # bytes, which the caches of a core may lose until the end of a backward

_ATEN = torch.ops.aten
_PRODUCTS = {operator.getitem} | {
    getattr(getattr(_ATEN, name), overload)
    for overload, names in {"default": "mm bmm convolution_backward t view permute", "int": "transpose"}.items()
    for name in names.split()
}


def adding_up(piece: Piece, held: Sequence[fx.Node]) -> Piece:
    """The piece with sums among its inputs. Its last outputs are the gradients of what is ``held``, in this order."""
    nodes = list(piece.module.graph.nodes)
    (results,) = nodes[-1].args
    begin = len(results) - len(held)
    added = {at: each for at, each in enumerate(held) if _is_worth_it(results[begin + at], each)}
    behind: dict[fx.Node, list[int]] = {}
    for at in added:
        behind.setdefault(_last_change(results[begin + at], nodes), []).append(at)
    graph = fx.Graph()
    copies = {node: graph.node_copy(node) for node in nodes if node.op == "placeholder"}
    sums = {at: graph.placeholder(f"sum_of_{each.name}") for at, each in added.items()}
    for at, each in added.items():
        FAKE_VALUE.put(sums[at], FAKE_VALUE.of(each))
    for node in nodes[:-1]:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for at in behind.get(node, ()):
            graph.call_function(_ATEN.add_.Tensor, (sums[at], copies[results[begin + at]]))
    graph.output([None if each is None or at - begin in added else copies[each] for at, each in enumerate(results)])
    graph.set_codegen(TakesAList())
    module = fx.GraphModule(piece.module, graph)
    return Piece(module, [*piece.inputs, *sums.values()], piece.outputs, {sums[at]: at for at in added})


@dataclass(frozen=True)
class Parted:
    """A piece in two: the ``rest`` runs first, and gives what the ``sums`` take besides, behind its outputs.

    ``kept`` are the places of inputs that the sums take, and ``passed`` of those that the rest takes.
    """

    rest: Piece
    sums: Piece
    passed: Sequence[int]
    kept: Sequence[int]


def without_sums(piece: Piece) -> Parted | None:
    """A piece, and the products apart that go into its sums alone; None if it has no sums."""
    if not piece.sums:
        return None
    nodes = list(piece.module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    sums = {node for node, its in zip(inputs, piece.inputs) if its in piece.sums}
    apart = _products(nodes, sums)
    needed = dict.fromkeys(
        each for node in nodes if node in apart for each in node.all_input_nodes if each not in apart
    )
    made = [node for node in needed if node.op != "placeholder"]
    passed = [at for at, node in enumerate(inputs) if node not in sums]
    kept = [at for at, node in enumerate(inputs) if node in needed]
    (results,) = nodes[-1].args
    first = [node for node in nodes[:-1] if node.op != "placeholder" and node not in apart]
    return Parted(
        piece_of(piece.module, [inputs[at] for at in passed], [*results, *made], first),
        piece_of(piece.module, [*(inputs[at] for at in kept), *made], [], apart),
        passed,
        kept,
    )


def _products(nodes: Sequence[fx.Node], sums: Collection[fx.Node]) -> set[fx.Node]:
    """The additions to sums, and the products and views that only these read, of memory that nothing changes in place."""
    found = {node for node in nodes if node.target is _ATEN.add_.Tensor and node.args[0] in sums}
    written = {memory for node in nodes if node not in found for memory in written_by(node)}
    for node in reversed(nodes):
        alone = node.target in _PRODUCTS and node.users and found.issuperset(node.users)
        if alone and written.isdisjoint(map(storage_of, node.all_input_nodes)):
            found.add(node)
    return found


def _is_worth_it(gradient: fx.Node | None, parameter: fx.Node) -> bool:
    if gradient is None:
        return False
    value, whole = FAKE_VALUE.of(gradient), FAKE_VALUE.of(parameter)
    return bool(
        value.nbytes >= _WORTH_IT
        and value.layout is torch.strided
        and (value.shape, value.dtype, value.device) == (whole.shape, whole.dtype, whole.device)
    )


def _last_change(gradient: fx.Node, nodes: Sequence[fx.Node]) -> fx.Node:
    """The node behind which a gradient is whole. What comes later may still change it in place."""
    memory = storage_of(gradient)
    return next((node for node in reversed(nodes) if memory in written_by(node)), gradient)
