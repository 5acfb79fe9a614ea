"""Notes at each operation that may draw random numbers what it is called in the model, wherever that is cut.

layers.0.dropout          the call of this module
layers.0.dropout#1        the second call of it
layers.0:dropout          the first call of a function `dropout` in the forward of layers.0
layers.0:dropout#1        the second one
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from pippy.ir.base.node_notes import DRAWS, MODULE_PATH
from pippy.ir.base.operations import drops_nothing, name_of
from pippy.ir.record.traced import Traced
from pippy.ir.run.checkpointed_parts import is_begin, is_end
from pippy.ir.run.may_draw import Draws, function_draws, method_draws, module_draws


def name_draws(traced: Traced) -> None:
    """Note at each node that may draw, its name and whether Python's generators are meant too."""
    counts = Counter[str]()
    for node in traced.graph.nodes:
        draws = _draws(node, traced.attributes)
        if draws is not Draws.NOTHING:
            name = _name(node)
            number = counts[name]
            counts[name] += 1
            DRAWS.put(node, (f"{name}#{number}" if number else name, draws is Draws.PYTHONS_TOO))


def _draws(node: fx.Node, attributes: Mapping[str, Any]) -> Draws:
    if is_begin(node) or is_end(node) or _is_never(node):
        return Draws.NOTHING
    if node.op == "call_module":
        return module_draws(attributes[str(node.target)])
    if node.op == "call_method":
        return method_draws(str(node.target))
    return function_draws(node.target) if node.op == "call_function" and callable(node.target) else Draws.NOTHING


def _is_never(node: fx.Node) -> bool:
    """Whether a node is a dropout of nothing."""
    return node.op == "call_function" and drops_nothing(node.target, node.args, node.kwargs)  # type: ignore[arg-type]


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    return f"{MODULE_PATH.of(node)}:{name_of(node.target)}"
