"""Counts the layers, parameters and bytes of each operation of a traced graph. Nothing runs."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import fx
from torch.nn.parameter import is_lazy

from pippy.ir.base.errors import BalanceError
from pippy.ir.base.node_notes import IS_LAYER
from pippy.ir.base.trees import nbytes
from pippy.ir.cut.constraints import Constraint, constraints
from pippy.ir.cut.cuts import crossing, inside_lists
from pippy.ir.cut.params import MultiUseParamSpec
from pippy.ir.cut.uses import operations, uses_of_tensors
from pippy.ir.record.traced import Traced
from pippy.ir.run.checkpointed_parts import is_begin, is_end


@dataclass
class Figures:
    """The operations in order, and their layers, parameters and bytes.

    ``layers`` is 1 for an operation that uses parameters, or for each if none does. ``parameters`` counts each parameter
    where it is first used. ``held`` has the bytes of tensors that every stage with a use has, ``bytes`` those of tensors that
    only the first such stage has; a trained parameter counts ``param_scale`` times. ``crossing`` are the bytes that cross a cut
    before the operation, and ``inside`` is the number of modules of lists, one inside the other, that this cut would divide.
    """

    nodes: list[fx.Node]
    layers: list[int]
    parameters: list[int]
    bytes: list[int]
    held: list[dict[Hashable, int]]
    crossing: list[int]
    inside: list[int]
    constraints: list[Constraint]


def figures_of(traced: Traced, spec: MultiUseParamSpec = None, param_scale: float = 1.0) -> Figures:
    """The figures of a traced graph.

    >>> from torch import nn
    >>> from pippy.ir.trace.trace import trace
    >>> figures = figures_of(trace(nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2))))
    >>> figures.layers, figures.parameters, figures.bytes
    ([1, 0, 1], [10, 0, 6], [40, 0, 24])
    """
    nodes = operations(traced)
    count = len(nodes)
    if not count:
        raise BalanceError(f"{type(traced.model).__name__} computes nothing: its forward has no operation to balance")
    figures = Figures(
        nodes,
        [int(IS_LAYER.of(node)) for node in nodes],
        [0] * count,
        [0] * count,
        [{} for _ in nodes],
        crossing(traced, spec=spec),
        inside_lists(traced),
        constraints(traced, spec),
    )
    for key, uses in uses_of_tensors(traced).items():
        if not uses.all:
            continue
        if is_lazy(uses.tensor):
            raise BalanceError(
                f"{uses.name!r} has no size yet: a lazy module gets its parameters in its first forward. Call the model once, "
                "then balance it"
            )
        trains = isinstance(uses.tensor, torch.nn.Parameter) and uses.tensor.requires_grad
        size = round(nbytes(uses.tensor) * (param_scale if trains else 1))
        copied = bool(uses.by_leaf) and len(uses.all) > 1
        for index in uses.all if copied else ():
            figures.held[index][key] = size
        if isinstance(uses.tensor, torch.nn.Parameter):
            for index in uses.all:
                figures.layers[index] = 1
        first = uses.all[0]
        figures.parameters[first] += uses.tensor.numel() if isinstance(uses.tensor, torch.nn.Parameter) else 0
        figures.bytes[first] += 0 if copied else size
    if not any(figures.layers):
        figures.layers = [int(not is_begin(node) and not is_end(node)) for node in nodes]
    return figures
