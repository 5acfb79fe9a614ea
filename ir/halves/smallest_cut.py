"""What to keep of one part of a graph for another, in the fewest bytes: ``smallest_cut``.

    kept  ──▶ a ──▶ view ──▶ b           a keeps less than view and sum do: keep a, and compute the view and the sum again
              └──▶ sum  ──▶ c

It is a minimum cut. Each value is an edge whose capacity is its bytes. Operations that are cheap may be computed again. Of
several cuts with as few bytes it is the one that computes the least again.
"""

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx

from pippy.ir.base.node_notes import FAKE_VALUE
from pippy.ir.base.trees import nbytes

aten = torch.ops.aten

# Pointwise operations that take no longer than to read their inputs and write their result.
_CHEAP = {
    getattr(aten, name)
    for name in (
        "add sub rsub mul div neg abs relu threshold_backward where masked_fill clone copy _to_copy ge gt le lt eq ne "
        "logical_not logical_and logical_or bitwise_not bitwise_and square reciprocal minimum maximum clamp clamp_min "
        "clamp_max empty_like new_empty_strided full full_like zeros_like "
        "ones_like new_zeros arange scalar_tensor lift_fresh_copy"
    ).split()
}
_SOURCE, _SINK = "source", "sink"
_SCALE = 1 << 20  # more than there are nodes: what is added to the bytes decides between cuts with as many


def is_view(node: fx.Node) -> bool:
    """Whether a node gives the memory of another one, or an item of a tuple."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )


def is_cheap(node: fx.Node) -> bool:
    """Whether a node may be computed again: it is a view, or pointwise and quick, and gives the same bits each time."""
    return node.op == "get_attr" or (
        node.op == "call_function" and (is_view(node) or getattr(node.target, "overloadpacket", None) in _CHEAP)
    )


def value_bytes(node: fx.Node) -> int | None:
    """The bytes of a node's value; None if it is no tensor."""
    value = FAKE_VALUE.get(node)
    return nbytes(value) if isinstance(value, torch.Tensor) else None


def smallest_cut(
    wanted: Iterable[fx.Node],
    free: Collection[fx.Node],
    needed_by: Callable[[fx.Node], Iterable[fx.Node]],
    here: Callable[[fx.Node], bool],
    repeats: Callable[[fx.Node], bool],
    only_for_it: Collection[fx.Node] = (),
) -> list[fx.Node]:
    """The nodes to keep for those that are ``wanted`` behind the cut, in the order of the graph.

    Values that are ``free`` are there anyway. ``needed_by`` gives a node's inputs, and what has to run before it. A node that
    is ``here`` is computed before the cut; it may be computed again behind it if it ``repeats``. All that is not here is
    computed behind the cut. What would be computed before the cut ``only_for_it`` is kept only if that takes fewer bytes.
    """
    import networkx as nx  # slow to import, and only needed here

    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    seen: set[fx.Node] = set()
    stack: list[tuple[fx.Node, Any]] = [(node, _SINK) for node in wanted]
    while stack:
        node, taker = stack.pop()
        if node in free:
            continue
        if here(node):
            network.add_edge((node, "out"), taker)  # of infinite capacity, as all without one
        if node in seen:
            continue
        seen.add(node)
        if not here(node):
            stack.extend((each, _SINK) for each in needed_by(node) if each in node.all_input_nodes or not here(each))
            continue
        size = value_bytes(node)
        weight = None if size is None else size * _SCALE + (node in only_for_it)
        network.add_edge((node, "in"), (node, "out"), **({} if weight is None else {"capacity": weight}))
        if repeats(node):
            stack.extend((each, (node, "in")) for each in needed_by(node))
        else:
            network.add_edge(_SOURCE, (node, "in"))
    _, (before, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    insides = [node for node in seen if here(node)]
    return sorted(node for node in insides if (node, "in") in before and (node, "out") not in before)
