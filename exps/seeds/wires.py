"""The bytes of the values that travel between stages: before anything runs, and as a step was recorded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from pippy import Pipe
from pippy.drivers.lowering.flow import value_names
from pippy.drivers.plan.language.program import Program
from pippy.drivers.report.record import RecordedStep
from pippy.ir.base.names import LOSS
from pippy.ir.pipe import compiled_of
from pippy.ir.record.compiled import in_backward_pass


class _Sizes(fx.Interpreter):
    """Runs the forward of a Pipe, and notes the bytes of each value."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(compiled_of(pipe).split_gm)
        self.bytes: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        if in_backward_pass(n) or n.target == LOSS or n.op == "output":
            return None
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.bytes[n] = value.numel() * value.element_size()
        return value


def value_bytes(pipe: Pipe, *inputs: torch.Tensor) -> dict[str, int]:
    """The bytes of each value of one micro-batch, by its name in programs. The inputs may be without data, as the model."""
    sizes, names = _Sizes(pipe), value_names(compiled_of(pipe))
    placeholders = compiled_of(pipe).split_gm.graph.find_nodes(op="placeholder")
    sizes.run(*inputs, *[None] * (len(placeholders) - len(inputs)))
    return {names[node]: size for node, size in sizes.bytes.items() if node in names}


def edge_bytes(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """The bytes of each value that a program sends: a gradient has the size of its value."""
    return {edge.value: sizes[edge.value.partition("_grad_from_")[0]] for edge in program.flow}


def sent_bytes(program: Program, sizes: Mapping[str, int]) -> dict[tuple[int, int], int]:
    """The bytes that one micro-batch sends, from each worker to each other: values and sums cross once to each."""
    worker_of, bytes_of = program.placement.worker_of, edge_bytes(program, sizes)
    found: dict[tuple[int, int], int] = {}
    for edge in (each for each in program.flow if each.value not in program.sum_of):
        source = worker_of[edge.source.stage]
        for target in {worker_of[each.stage] for each in edge.targets} - {source}:
            found[source, target] = found.get((source, target), 0) + bytes_of[edge.value]
    return found


def recorded_bytes(step: RecordedStep) -> dict[tuple[int, int], int]:
    """The bytes that a whole step really sent, from each worker to each other."""
    found: dict[tuple[int, int], int] = {}
    for moved in step.traffic():
        found[moved.source, moved.to] = found.get((moved.source, moved.to), 0) + moved.bytes
    return found
