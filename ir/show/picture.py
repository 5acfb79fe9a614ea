"""What is to be shown of a Pipe: its flow, its shapes for example arguments, and one row of figures for each stage.

`graph_text`, `stages_table`, `draw` and `svg` only put this into letters and lines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pippy.ir.compiled import Compiled
from pippy.ir.names import user_name
from pippy.ir.show.flow import Box, Flow, Replicas, Value, flow_of
from pippy.ir.show.shapes import Amount, Shape, Shapes, propagate
from pippy.ir.show.units import bytes_text, count_text, shortened
from pippy.ir.trees import nbytes

_LONGEST_WAY = 6


@dataclass(frozen=True)
class StageRow:
    """The figures of one stage, or of the loss. Those after ``buffer_bytes`` are None without example arguments.

    A value that is sent to two stages counts twice in ``sends``.
    """

    name: str
    holds: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    receives: Amount | None = None
    sends: Amount | None = None
    flops: Amount | None = None


@dataclass(frozen=True)
class Picture:
    """Everything that a drawing needs. ``rows`` has the stages and the loss, in order."""

    flow: Flow
    shapes: Shapes | None
    rows: dict[str, StageRow]

    def shape(self, value: Value) -> Shape | None:
        """The shape of a value, where it was asked for."""
        return self.shapes.values[value.node] if self.shapes else None

    def size_text(self, value: Value, longest: int = 1000) -> str:
        """What a value is and how large, in a line; empty without example arguments. What it is gives way to how large."""
        shape = self.shape(value)
        if shape is None:
            return ""
        size = f" {bytes_text(shape.nbytes)}" if shape.nbytes else ""
        return shortened(shape.text, longest - len(size)) + size

    def figures(self, box: Box) -> list[str]:
        """A few words on a stage; nothing on what is no stage."""
        row = self.rows.get(box.name) if box.kind in ("stage", "loss") else None
        if row is None:
            return []
        noun = "parameter" if row.parameters == 1 else "parameters"
        words = [f"{count_text(row.parameters)} {noun}"] if row.parameters or box.kind == "stage" else []
        return words + ([f"{amount_text(row.flops, count_text)} FLOPs"] if row.flops else [])


def picture_of(compiled: Compiled, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Picture:
    """The picture of a Pipe; with arguments, as the Pipe is called with them, it has shapes, bytes and FLOPs."""
    flow = flow_of(compiled)
    shapes = propagate(compiled, args, kwargs or {}) if args or kwargs else None
    boxes = [(index, box) for index, box in enumerate(flow.boxes) if box.kind in ("stage", "loss")]
    rows = {box.name: _row(compiled.stage(box.name), index, box, flow, shapes) for index, box in boxes}
    return Picture(flow, shapes, rows)


def _row(module: nn.Module, index: int, box: Box, flow: Flow, shapes: Shapes | None) -> StageRow:
    parameters, buffers = _sized(module.parameters()), _sized(module.buffers())
    holds = (type(module).__name__,) if box.kind == "loss" else tuple(map(user_name, _held(module)))
    figures = sum(tensor.numel() for tensor in parameters), nbytes(parameters), nbytes(buffers)
    if shapes is None:
        return StageRow(box.name, holds, *figures)
    receives = _sum(shapes.values[value.node] for value in flow.values if index in value.users)
    sent = (value for value in flow.values if value.source == index)
    sends = _sum(shapes.values[value.node] for value in sent for _ in value.users)
    return StageRow(box.name, holds, *figures, receives, sends, shapes.flops[box.name])


def _held(module: nn.Module, path: str = "") -> Iterator[str]:
    """The modules and tensors that the user put together; those that only stand on the way to them are left out."""
    yield from (path + name for name in (*module._parameters, *module._buffers))
    for name, child in module.named_children():
        yield from _held(child, f"{path}{name}.") if type(child) is nn.Module else (path + name,)


def _sized(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have a size: the tensors of a lazy module get theirs in its first forward."""
    return [tensor for tensor in tensors if not is_lazy(tensor)]


def _sum(shapes: Iterable[Shape]) -> Amount:
    sizes = [shape.nbytes for shape in shapes]
    return Amount(sum(size or 0 for size in sizes), None not in sizes)


def amount_text(amount: Amount | None, unit: Any) -> str:
    """An amount in ``unit``; with a sign before it where it is a lower bound, and ``unknown`` where that says nothing.

    >>> amount_text(Amount(2048), bytes_text), amount_text(Amount(64, False), bytes_text), amount_text(Amount(0, False), str)
    ('2.0 KiB', '≥ 64 B', 'unknown')
    """
    if amount is None:
        return ""
    if not amount.complete:
        return f"≥ {unit(amount.count)}" if amount.count else "unknown"
    return str(unit(amount.count))


def tag(value: Value) -> str:
    """What is special about a value, in words; empty for an activation.

    >>> tag(Value("embed_weight", "getitem", "parameter", 1, (2,), "embed.weight"))
    'parameter embed.weight'
    """
    if value.kind == "value" or value.name == value.kind:
        return ""
    return value.kind if value.origin in ("", value.name) else f"{value.kind} {value.origin}"


def backward_text(flow: Flow) -> str:
    """One line on the backward, which is not drawn."""
    if not flow.backward:
        return "backward: none, as the Pipe has no loss"
    computing = [box.name for box in reversed(flow.boxes) if box.kind in ("stage", "loss")]
    steps = [name for name in computing if name in flow.backward]
    way = " → ".join(steps if len(steps) <= _LONGEST_WAY else [*steps[:2], "…", *steps[-2:]])
    without = [name for name in reversed(computing) if name not in flow.backward]
    return f"backward: {way}; gradients take the same ways back" + (
        f"; none in {', '.join(without)}" if without else ""
    )


def replicas_text(flow: Flow, replicas: Replicas) -> str:
    """One line on parameters that several stages hold a copy of."""
    holders = ", ".join(flow.boxes[index].name for index in replicas.boxes)
    return f"replicated: {', '.join(replicas.names)} in {holders}; gradients are summed"


def notes(picture: Picture) -> list[str]:
    """The lines below a drawing: what is replicated, the backward, and what is unknown and why."""
    lines = [replicas_text(picture.flow, each) for each in picture.flow.replicas]
    lines.append(backward_text(picture.flow))
    unknown = picture.shapes.unknown if picture.shapes else []
    return lines + [f"unknown: {each.explain()}" for each in unknown]
