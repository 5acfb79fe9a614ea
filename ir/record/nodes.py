"""Reading the nodes of the top-level graph: their inputs, and the `getitem` nodes of their outputs."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from pippy.ir.base.trees import map_instances
from pippy.ir.run.stage_backward import SEED, stage_backward


def flat_inputs(call: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments of a call, in order. A node that is two arguments is in the list twice."""
    found: list[fx.Node] = []
    fx.node.map_arg(call.args, found.append)
    return found


def ancestors(loss: fx.Node) -> set[fx.Node]:
    """The nodes that the loss depends on, and the loss."""
    seen, pending = {loss}, [loss]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in seen:
                seen.add(node)
                pending.append(node)
    return seen


def output_items(call: fx.Node) -> dict[int, fx.Node]:
    """The `getitem` nodes of a call's outputs, by index; empty if the call has one output."""
    return {user.args[1]: user for user in call.users if is_getitem(user)}  # type: ignore[misc]


def is_getitem(node: fx.Node) -> bool:
    """Whether a node is a `getitem`."""
    return node.op == "call_function" and node.target is operator.getitem


def in_backward_pass(node: fx.Node) -> bool:
    """Whether a node of the top-level graph belongs to the backward pass: a `stage_backward`, or what uses its gradients."""
    if is_getitem(node):
        return in_backward_pass(node.args[0])  # type: ignore[arg-type]
    return node.op == "call_function"


def forward_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of the top-level graph without its backward pass, in order."""
    return [node for node in graph.nodes if not in_backward_pass(node)]


def values_read(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node reads when it runs.

    A backward reads only gradients. The outputs and inputs of its stage are kept with the run of the stage.
    """
    if node.target is not stage_backward:
        return node.all_input_nodes
    found: list[fx.Node] = []
    fx.node.map_arg(node.kwargs["output_grads"], found.append)
    return found


def values_to_free(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The values that can be freed after each node: those that no later node reads, and its own if no node reads it."""
    last_reader: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last_reader[node] = node
        last_reader.update(dict.fromkeys(values_read(node), node))
    freed: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last_reader.items():
        freed.setdefault(reader, []).append(value)
    return freed


def walk(
    nodes: Iterable[fx.Node], value: Callable[[fx.Node], Any], values: dict[fx.Node, Any], frees: bool = False
) -> Any:
    """Give what a graph returns: ``value`` says of each node what it gives, and ``values`` has what earlier ones gave.

    With ``frees``, those are taken out that no later node reads.

    >>> graph = fx.symbolic_trace(lambda x, y: (x + y) * y).graph
    >>> values, given = {}, iter([2, 3])
    >>> walk(graph.nodes, lambda node: next(given, 15), values), len(values)
    (15, 4)
    """
    nodes = list(nodes)
    free_after = values_to_free(nodes) if frees else {}
    for node in nodes:
        if node.op == "output":
            return map_nodes(values.__getitem__, node.args[0])
        values[node] = value(node)
        for each in free_after.get(node, ()):
            del values[each]
    raise AssertionError("a graph ends in its output")


def seeded(output_grads: Any) -> Any:
    """The argument ``output_grads`` of a backward node, with `SEED` for None: in the graph, None means that the output is
    the loss. (A value that is None when the graph runs means that there is no gradient.)"""
    return SEED if output_grads is None else output_grads


def map_nodes(function: Callable[[fx.Node], Any], argument: Any) -> Any:
    """``argument`` with ``function(node)`` in place of each node.

    The containers are plain ones, since the user may get them; those of `fx.node.map_arg` are immutable.
    """
    return map_instances(fx.Node, function, argument)
