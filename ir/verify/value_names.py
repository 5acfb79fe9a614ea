"""The names of values, computed again from the graphs. The verifier compares the recorded names with them."""

from typing import Any

from torch import fx

from pippy.ir.base.names import LOSS
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.nodes import is_getitem
from pippy.ir.record.wiring import ValueName


def value_name(compiled: Compiled, node: fx.Node) -> str | None:
    """The name of the value of a top-level node: the name of its input, or of the node in its stage that makes it."""
    if node.op == "placeholder":
        return node.name
    call, index = (node.args[0], node.args[1]) if is_getitem(node) else (node, None)
    if not isinstance(call, fx.Node) or call.op != "call_module":
        return None
    if call.target == LOSS:
        return LOSS if index is None else None
    made = compiled.stage_outputs(str(call.target))
    if isinstance(made, fx.Node):
        return made.name if index is None else None
    return made[index].name if isinstance(index, int) and 0 <= index < len(made) else None


def names_of(compiled: Compiled, argument: Any) -> Any:
    """An argument of the top-level graph with each node replaced by the name of its value."""
    return fx.node.map_arg(argument, lambda node: ValueName(value_name(compiled, node) or f"?{node.name}"))
