"""What ``compile=`` makes of the stages of a Pipe, found on tensors without data: nothing is computed or compiled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pippy.drivers.worker.compiled.stage_graphs import StageGraphs
from pippy.ir.base.trees import map_tensors
from pippy.ir.call.signature import bind
from pippy.ir.halves.joint import storage_of, value_bytes
from pippy.ir.halves.pieces import Piece, Pieces
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.record.compiled import forward_nodes, map_nodes
from pippy.ir.show.shapes import propagate_values, unknown_in


@dataclass(frozen=True)
class StagePieces:
    """A stage, or the loss: the number of operations in its pieces, and the bytes that are kept between them.

    ``kept`` is kept by F for the backward, ``handed`` by I for W; the first number is that of the smallest cut, the second
    one is without anything that is computed again. If the stage has no graph, ``reason`` says why, behind "it".
    """

    name: str
    reason: str | None = None
    operations: tuple[int, int, int, int] = (0, 0, 0, 0)  # of F, B, I and W
    kept: tuple[int, int] = (0, 0)
    handed: tuple[int, int] = (0, 0)


def stage_pieces(pipe: Pipe, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[StagePieces]:
    """The pieces of each stage for a micro-batch of these arguments, the loss's target included.

    >>> from torch import nn
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.MSELoss())
    >>> [(each.name, each.kept) for each in stage_pieces(pipe, [torch.zeros(2, 4), torch.zeros(2, 4)], {})]
    [('submod_0', (32, 32)), ('submod_1', (32, 32)), ('_loss', (64, 64))]
    """
    compiled = compiled_of(pipe)
    values = propagate_values(compiled, bind(compiled, args, kwargs))
    found = []
    with torch.set_grad_enabled(compiled.loss is not None):
        for node in forward_nodes(compiled.split_gm.graph):
            if node.op == "call_module":
                name, inputs = str(node.target), map_nodes(values.__getitem__, node.args)
                unknown = unknown_in(inputs)
                if unknown is None:
                    found.append(_pieces(StageGraphs(name, compiled.stage(name)), map_tensors(_like, inputs)))
                else:
                    found.append(StagePieces(name, f"has inputs of unknown shapes ({unknown.explain()})"))
    return found


def _pieces(graphs: StageGraphs, inputs: Sequence[Any]) -> StagePieces:
    form = graphs.form(inputs)
    if isinstance(form, str):
        return StagePieces(graphs.stage.name, form)
    cut, plain = form.cut, Pieces(form.cut.joint, keeps_all=True)
    made = [cut.forward, cut.backward, cut.backward_input, cut.backward_weight]
    first, second, third, fourth = map(_operations, made)
    return StagePieces(
        graphs.stage.name,
        None,
        (first, second, third, fourth),
        (_nbytes(cut, cut.kept), _nbytes(cut, plain.kept)),
        (_nbytes(cut, cut.handed), _nbytes(cut, plain.handed)),
    )


def _operations(piece: Piece) -> int:
    return sum(node.op == "call_function" for node in piece.module.graph.nodes)


def _nbytes(pieces: Pieces, nodes: Sequence[fx.Node]) -> int:
    """The bytes of the values of nodes. Those that share memory count once, and those of parameters and buffers never."""
    largest: dict[Any, int] = {}
    for node in nodes:
        memory = storage_of(node)
        largest[memory] = max(largest.get(memory, 0), value_bytes(node) or 0)
    held = {storage_of(node) for node in pieces.joint.held}
    return sum(size for memory, size in largest.items() if memory not in held)


def _like(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the same form, with any numbers."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)
