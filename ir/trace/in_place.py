"""In-place operators and methods among the nodes that tracing makes."""

from typing import Any

from torch import fx

from pippy.ir.base.operations import IN_PLACE, is_in_place, name_of


def is_changed_in_place(value: Any) -> bool:
    """Whether ``value`` is what an in-place operation gave of a tensor that the model has in a container."""
    if not issubclass(type(value), fx.Proxy):
        return False
    node = value.node
    while node.op.startswith("call_") and is_in_place(node.target) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "get_attr"


def changes_in_place(node: fx.Node, attribute: str) -> bool:
    """Whether ``node`` is an in-place operator on the attribute of the model with that name."""
    if node.op != "call_function" or name_of(node.target) not in IN_PLACE:
        return False
    changed = node.args[0]
    return isinstance(changed, fx.Node) and changed.op == "get_attr" and changed.target == attribute
