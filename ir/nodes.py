"""Reading the nodes of the top-level graph: their inputs, and the `getitem` nodes of their outputs."""

import operator
from typing import Any

from torch import fx

from pippy.ir.run.stage_backward import SEED


def flat_inputs(call: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments of a call, in order; a node that is there twice is in the list twice."""
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.node.map_arg(call.args, note)
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


def seeded(output_grads: Any) -> Any:
    """The argument ``output_grads`` of a backward node, with `SEED` for None: in the graph, None says that the output is
    the loss. (A value that is None when the graph runs says that there is no gradient.)"""
    return SEED if output_grads is None else output_grads


def map_nodes(function: Any, argument: Any) -> Any:
    """``argument`` with ``function(node)`` in place of each node.

    The containers are plain ones, which the user may get. `fx.node.map_arg` makes them immutable.
    """
    if isinstance(argument, fx.Node):
        return function(argument)
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(map_nodes(function, item) for item in argument))
    if isinstance(argument, (tuple, list)):
        return (tuple if isinstance(argument, tuple) else list)(map_nodes(function, item) for item in argument)
    if isinstance(argument, dict):
        return {key: map_nodes(function, item) for key, item in argument.items()}
    return argument
