"""What the top-level graph was made to take and to give, by the names of the values. The verifier holds it to that."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from pippy.ir.names import LOSS
from pippy.ir.nodes import is_getitem, map_nodes

if TYPE_CHECKING:
    from pippy.ir.pipe import Pipe


class ValueName(str):
    """The name of a value, where a constant could stand too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Wiring:
    """``inputs`` are the placeholders, in order; ``outputs`` is what the model returns, each value as its name."""

    inputs: tuple[str, ...]
    outputs: Any


def value_name(pipe: "Pipe", node: fx.Node) -> str | None:
    """The name of the value of a top-level node: the input's, or that of the node in its stage which makes it."""
    if node.op == "placeholder":
        return node.name
    call, index = (node.args[0], node.args[1]) if is_getitem(node) else (node, None)
    if not isinstance(call, fx.Node) or call.op != "call_module":
        return None
    if call.target == LOSS:
        return LOSS if index is None else None
    made = stage_outputs(pipe, str(call.target))
    if isinstance(made, fx.Node):
        return made.name if index is None else None
    return made[index].name if isinstance(index, int) and 0 <= index < len(made) else None


def stage_outputs(pipe: "Pipe", stage: str) -> Any:
    """The node in a stage's graph that makes its output, or the tuple of them."""
    return pipe.stage(stage).graph.output_node().args[0]


def names_of(pipe: "Pipe", argument: Any) -> Any:
    """An argument of the top-level graph with each node replaced by the name of its value."""
    return map_nodes(lambda node: ValueName(value_name(pipe, node) or f"?{node.name}"), argument)
