"""The figures of a stage: what it holds, and what it receives, sends and computes in one forward."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pippy.ir.base.names import user_name
from pippy.ir.base.trees import nbytes
from pippy.ir.show.shapes import Amount, Shapes, add_amounts
from pippy.ir.show.structure import Structure


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
    holds = (type(module).__name__,) if box.kind == "loss" else tuple(map(user_name, _held(module)))
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
