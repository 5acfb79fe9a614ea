"""How to read the nodes of a graph: what they take, and what is taken out of them."""

import operator
from typing import Any

from torch import fx

from pippy.ir.run.stage_backward import SEED


def flat_inputs(call: fx.Node) -> list[fx.Node]:
    """The nodes that a call takes, in order; one that it takes twice is there twice."""
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.node.map_arg(call.args, note)
    return found


def ancestors(loss: fx.Node) -> set[fx.Node]:
    """Everything that the loss depends on, the loss included."""
    seen, pending = {loss}, [loss]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in seen:
                seen.add(node)
                pending.append(node)
    return seen


def output_items(call: fx.Node) -> dict[int, fx.Node]:
    """The getitem nodes that take out the outputs of a call, by index; empty where the call has one output."""
    return {user.args[1]: user for user in call.users if is_getitem(user)}  # type: ignore[misc]


def is_getitem(node: fx.Node) -> bool:
    """Whether a node takes one entry out of another node's value."""
    return node.op == "call_function" and node.target is operator.getitem


def seeded(output_grads: Any) -> Any:
    """What a written ``output_grads = None`` means: the output is the loss. (A value that is None at run time means that
    there is no gradient.)"""
    return SEED if output_grads is None else output_grads


def map_nodes(function: Any, argument: Any) -> Any:
    """``argument`` with every node in it replaced, in plain tuples, lists and dicts."""
    if isinstance(argument, fx.Node):
        return function(argument)
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(map_nodes(function, item) for item in argument))
    if isinstance(argument, (tuple, list)):
        return (tuple if isinstance(argument, tuple) else list)(map_nodes(function, item) for item in argument)
    if isinstance(argument, dict):
        return {key: map_nodes(function, item) for key, item in argument.items()}
    return argument
