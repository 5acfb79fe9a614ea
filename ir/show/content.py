"""What a drawing shows of a Pipe: its structure, shapes for example arguments, the figures of stages, the notes, the table.

The structure is the forward part of a Pipe's graph, its boxes and the values between them:

x ──▶ [ submod_0 ] ── relu ──▶ [ submod_1 ] ── lin ──▶ output

(1) boxes: model inputs, stages, the loss, the output       (2) values: one source, any number of users

The backward is not drawn: the gradient of a value goes the same way, in the other direction.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from pippy.ir.base.names import LOSS, user_name
from pippy.ir.base.readable import bytes_text, count_text, shortened, text_table
from pippy.ir.base.trees import nbytes
from pippy.ir.record.compiled import Compiled, is_getitem, maker_of
from pippy.ir.run.functions import own_copy
from pippy.ir.run.stage_backward import stage_backward
from pippy.ir.show.shapes import Amount, Shape, Shapes, add_amounts, propagate


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
    maker: Any = maker_of(compiled, node)
    if maker is not None and maker.target is own_copy:
        maker = maker.args[0]
    if maker is None or maker.op != "get_attr":
        return "value", ""
    local = f"{source.target}.{maker.target}"
    held = dict(compiled.split_gm.named_parameters(remove_duplicate=False)).get(local)
    return "parameter" if isinstance(held, nn.Parameter) else "buffer", compiled.remap_qualname(local)


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


_LONGEST_WAY, _HOLDS = 6, 48


@dataclass(frozen=True)
class ForwardFigures:
    """The bytes that a stage receives and sends in one forward, and its FLOPs.

    A value that is sent to two stages counts twice in ``sends``.
    """

    receives: Amount
    sends: Amount
    flops: Amount


@dataclass(frozen=True)
class StageFigures:
    """The figures of one stage, or of the loss. ``forward`` is None without example arguments."""

    name: str
    holds: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    forward: ForwardFigures | None = None


def stage_figures(module: nn.Module, index: int, structure: Structure, shapes: Shapes | None) -> StageFigures:
    """The figures of the stage whose box has this index."""
    box = structure.boxes[index]
    parameters, buffers = _sized(module.parameters()), _sized(module.buffers())
    held = tuple(user_name(each) or "the model" for each in _held(module))
    holds = (type(module).__name__,) if box.kind == "loss" else held
    sizes = sum(tensor.numel() for tensor in parameters), nbytes(parameters), nbytes(buffers)
    if shapes is None:
        return StageFigures(box.name, holds, *sizes)
    received = (value for value in structure.values if index in value.users)
    sent = (value for value in structure.values if value.source == index)
    receives = add_amounts(shapes.values[value.node].size for value in received)
    sends = add_amounts(shapes.values[value.node].size for value in sent for _ in value.users)
    return StageFigures(box.name, holds, *sizes, ForwardFigures(receives, sends, shapes.flops[box.name]))


def _held(module: nn.Module, path: str = "") -> Iterator[str]:
    """The modules and tensors of a stage, without the plain containers that hold them."""
    yield from (path + name for name in (*module._parameters, *module._buffers))
    for name, child in module.named_children():
        yield from _held(child, f"{path}{name}.") if type(child) is nn.Module else (path + name,)


def _sized(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that have a size. Those of a lazy module get their size in its first forward."""
    return [tensor for tensor in tensors if not is_lazy(tensor)]


@dataclass(frozen=True)
class Content:
    """What a drawing shows. ``stages`` has the figures of the stages and of the loss, by their names, in order.

    ``repeated`` are the parameters, and their bytes, that copies of replicated parameters add to the model's own.
    """

    structure: Structure
    shapes: Shapes | None
    stages: dict[str, StageFigures]
    repeated: tuple[int, int] = (0, 0)

    def shape(self, value: DrawnValue) -> Shape | None:
        """The shape of a value; None without example arguments."""
        return self.shapes.values[value.node] if self.shapes else None

    def size_text(self, value: DrawnValue, longest: int = 1000) -> str:
        """The shape and the bytes of a value in a line; empty without example arguments. A long shape is shortened."""
        shape = self.shape(value)
        if shape is None:
            return ""
        size = f" {bytes_text(shape.nbytes)}" if shape.nbytes else ""
        return shortened(shape.text, longest - len(size)) + size

    def stage_texts(self, box: Box) -> list[str]:
        """A few words about a stage or the loss; empty for another box."""
        if not box.computes:
            return []
        stage = self.stages[box.name]
        noun = "parameter" if stage.parameters == 1 else "parameters"
        words = [f"{count_text(stage.parameters)} {noun}"] if stage.parameters or box.kind == "stage" else []
        return words + ([f"{stage.forward.flops.text(count_text)} FLOPs"] if stage.forward else [])


def content_of(compiled: Compiled, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Content:
    """What a drawing of a Pipe shows; with the arguments of a call, also shapes, bytes and FLOPs."""
    structure = structure_of(compiled)
    shapes = propagate(compiled, args, kwargs or {}) if args or kwargs else None
    stages = {
        box.name: stage_figures(compiled.stage(box.name), index, structure, shapes)
        for index, box in enumerate(structure.boxes)
        if box.computes
    }
    again = [copy for _, *copies in compiled.copies() for copy in copies]
    return Content(structure, shapes, stages, (sum(copy.numel() for copy in again), nbytes(again)))


def backward_text(structure: Structure) -> str:
    """One line about the backward, which is not drawn."""
    if not structure.backward:
        return "backward: none, as the Pipe has no loss"
    computing = [box.name for box in reversed(structure.boxes) if box.computes]
    steps = [name for name in computing if name in structure.backward]
    order = " → ".join(steps if len(steps) <= _LONGEST_WAY else [*steps[:2], "…", *steps[-2:]])
    without = [name for name in reversed(computing) if name not in structure.backward]
    none = f"; none in {', '.join(without)}" if without else ""
    return f"backward: {order}; gradients take the same ways back{none}"


def copies_text(structure: Structure, copies: ParameterCopies) -> str:
    """One line about parameters of which several stages hold a copy."""
    holders = ", ".join(structure.boxes[index].name for index in copies.boxes)
    return f"replicated: {', '.join(copies.names)} in {holders}; gradients are summed"


def notes(content: Content) -> list[str]:
    """The lines below a drawing: replicated parameters, the backward, and unknown values with their reasons."""
    lines = [copies_text(content.structure, each) for each in content.structure.copies]
    lines.append(backward_text(content.structure))
    unknown = content.shapes.unknown if content.shapes else []
    return lines + [f"unknown: {each.explain()}" for each in unknown]


def stages_table(content: Content) -> str:
    """The table as text, with its notes below."""
    head, *rows, total = table_cells(content)
    once = ["the total counts replicated parameters once"] if any(content.repeated) else []
    return "\n".join([text_table(head, rows, total=total, words=(0, len(head) - 1)), *once, *notes(content)])


def table_cells(content: Content) -> list[list[str]]:
    """A head, a row for each stage, and the totals. The first and the last column are words, the others numbers."""
    heads = [
        "stage",
        "parameters",
        "bytes",
        "buffers",
        *(("receives", "sends", "FLOPs") if content.shapes else ()),
        "holds",
    ]
    rows = list(content.stages.values())
    return [heads, *map(_cells, rows), _cells(_total(rows, *content.repeated))]


def _cells(row: StageFigures) -> list[str]:
    """
    >>> _cells(StageFigures("submod_0", ("embed", "norm"), 15, 60, 0))
    ['submod_0', '15', '60 B', '0 B', 'embed, norm']
    """
    cells = [row.name, f"{row.parameters:,}", bytes_text(row.parameter_bytes), bytes_text(row.buffer_bytes)]
    if row.forward is not None:
        cells += [row.forward.receives.text(bytes_text), row.forward.sends.text(bytes_text)]
        cells.append(row.forward.flops.text(count_text))
    return [*cells, shortened(", ".join(row.holds), _HOLDS)]


def _total(rows: Sequence[StageFigures], repeated: int, repeated_bytes: int) -> StageFigures:
    parameters, parameter_bytes = sum(row.parameters for row in rows), sum(row.parameter_bytes for row in rows)
    sizes = parameters - repeated, parameter_bytes - repeated_bytes, sum(row.buffer_bytes for row in rows)
    forwards = [row.forward for row in rows if row.forward is not None]
    if not forwards:
        return StageFigures("total", (), *sizes)
    amounts = (add_amounts(getattr(each, name) for each in forwards) for name in ("receives", "sends", "flops"))
    return StageFigures("total", (), *sizes, ForwardFigures(*amounts))
