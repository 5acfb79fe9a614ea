"""In-place operators and methods among the nodes that tracing makes."""

from typing import Any

from torch import fx

IN_PLACE = "iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split()


def is_changed_in_place(value: Any) -> bool:
    """Whether ``value`` is what an in-place operation gave of a tensor that the model has in a container."""
    if not issubclass(type(value), fx.Proxy):
        return False
    node = value.node
    while node.op.startswith("call_") and _is_in_place(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "get_attr"


def _is_in_place(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def changes_in_place(node: fx.Node, attribute: str) -> bool:
    """Whether ``node`` is an in-place operator on the attribute of the model with that name."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") not in IN_PLACE:
        return False
    changed = node.args[0]
    return isinstance(changed, fx.Node) and changed.op == "get_attr" and changed.target == attribute
