"""The forward part of a Pipe's graph, to be drawn: its boxes and the values between them.

x ──▶ [ submod_0 ] ── relu ──▶ [ submod_1 ] ── lin ──▶ output
(1) boxes: model inputs, stages, the loss, the output       (2) values: one source, any number of users
The backward is not drawn: the gradient of a value goes the same way, in the other direction.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from pippy.ir.base.names import LOSS, stage_index
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.nodes import is_getitem
from pippy.ir.run.functions import own_copy
from pippy.ir.run.stage_backward import stage_backward


@dataclass(frozen=True)
class Box:
    """A box makes or takes values. Its kind is ``input``, ``stage``, ``loss`` or ``output``."""

    name: str
    kind: str

    @property
    def computes(self) -> bool:
        """Whether this is a stage or the loss."""
        return self.kind in ("stage", "loss")


@dataclass(frozen=True)
class DrawnValue:
    """A value and its way, in numbers of boxes. ``node`` is its name in the graph, ``name`` the one to show.

    ``kind`` is ``value``, ``target``, ``loss``, or ``parameter`` or ``buffer`` for a tensor of the model that travels;
    such a one is called ``origin`` by the user.
    """

    name: str
    node: str
    kind: str
    source: int
    users: tuple[int, ...]
    origin: str = ""

    @property
    def special(self) -> str:
        """A note on a value that is no activation, such as a parameter or the loss; empty for an activation.

        >>> DrawnValue("embed_weight", "getitem", "parameter", 1, (2,), "embed.weight").special
        'parameter embed.weight'
        """
        if self.kind == "value" or self.name == self.kind:
            return ""
        return self.kind if self.origin in ("", self.name) else f"{self.kind} {self.origin}"


@dataclass(frozen=True)
class ParameterCopies:
    """The names of parameters in the user's model, and the boxes that hold copies of them."""

    names: tuple[str, ...]
    boxes: tuple[int, ...]


@dataclass(frozen=True)
class Structure:
    """The structure of a Pipe for a drawing. ``backward`` holds the names of the boxes that have a backward."""

    boxes: tuple[Box, ...]
    values: tuple[DrawnValue, ...]
    copies: tuple[ParameterCopies, ...]
    backward: frozenset[str]


def structure_of(compiled: Compiled) -> Structure:
    """The structure of a Pipe, from its graph.

    >>> from torch import nn
    >>> from pippy.ir.pipe import Pipe
    >>> structure = structure_of(Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    >>> [box.name for box in structure.boxes], [(value.name, value.source, value.users) for value in structure.values]
    (['input_1', 'submod_0', 'submod_1', 'output'], [('input_1', 0, (1,)), ('_0', 1, (2,)), ('_1', 2, (3,))])
    """
    nodes = list(compiled.split_gm.graph.nodes)
    boxed = [node for node in nodes if node.op in ("placeholder", "call_module", "output")]
    index = {node: number for number, node in enumerate(boxed)}
    names = compiled.wiring.values
    values = tuple(_value(compiled, node, names[node.name], index) for node in nodes if node.name in names)
    boxes = tuple(_box(node) for node in boxed)
    calls: list[Any] = [node.kwargs["stage_output"] for node in nodes if node.target is stage_backward]
    return Structure(boxes, values, tuple(_copies(compiled, boxes)), frozenset(str(call.target) for call in calls))


def _box(node: fx.Node) -> Box:
    if node.op == "call_module":
        return Box(str(node.target), "loss" if node.target == LOSS else "stage")
    return Box(*((node.name, "input") if node.op == "placeholder" else ("output", "output")))


def _value(compiled: Compiled, node: fx.Node, name: str, index: dict[fx.Node, int]) -> DrawnValue:
    source: Any = node.args[0] if is_getitem(node) else node
    users = tuple(sorted(index[user] for user in node.users if user in index))
    kind, origin = _kind(compiled, node, source)
    return DrawnValue(name, node.name, kind, index[source], users, origin)


def _kind(compiled: Compiled, node: fx.Node, source: fx.Node) -> tuple[str, str]:
    if compiled.loss is not None and node.name == compiled.loss.value:
        return "loss", ""
    if node.name == compiled.target_name:
        return "target", ""
    maker = _maker(compiled, node, source)
    if maker is None or maker.op != "get_attr":
        return "value", ""
    local = f"{source.target}.{maker.target}"
    held = dict(compiled.split_gm.named_parameters(remove_duplicate=False)).get(local)
    return "parameter" if isinstance(held, nn.Parameter) else "buffer", compiled.remap_qualname(local)


def _maker(compiled: Compiled, node: fx.Node, source: fx.Node) -> fx.Node | None:
    """The node inside a stage that makes a value; for a copy of a tensor of the model, the node of the tensor."""
    if stage_index(str(source.target)) is None or source.op != "call_module":
        return None
    outputs: Any = compiled.stage_outputs(str(source.target))
    maker = outputs[node.args[1]] if is_getitem(node) else outputs
    if maker.target is own_copy and maker.args[0].op == "get_attr":
        return maker.args[0]
    return maker


def _copies(compiled: Compiled, boxes: tuple[Box, ...]) -> Iterator[ParameterCopies]:
    """One entry for each set of boxes, with all parameters of which they hold copies."""
    at = {box.name: number for number, box in enumerate(boxes) if box.computes}
    together: dict[tuple[int, ...], list[str]] = {}
    for group in compiled.replicated_params:
        stage, name = next(iter(group.items()))
        holders = tuple(sorted(at[stage] for stage in group))
        together.setdefault(holders, []).append(compiled.remap_qualname(f"{stage}.{name}"))
    for holders, names in together.items():
        yield ParameterCopies(tuple(names), holders)
