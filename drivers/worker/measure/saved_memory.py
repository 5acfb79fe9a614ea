"""Measures how many bytes a stage keeps from its forward for its backward, for the first micro-batch of a step.

Counted are the tensors that autograd saves, and the inputs of the stage. Parameters and buffers do not count, because they are
there anyway.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pippy.drivers.plan.language.instructions import Compute, Instruction, Op
from pippy.drivers.plan.language.program import computations_of
from pippy.drivers.worker.measure.calls import BoundCall
from pippy.ir.base.sparse_tensors import plain_parts
from pippy.ir.base.trees import tensors


class SavedMemory:
    """Measures the stages of one program on one worker.

    >>> linear = nn.Linear(4, 4)
    >>> x = torch.zeros(2, 4, requires_grad=True)
    >>> counter = ByteCounter([linear])
    >>> with counter.hooks():
    ...     y = linear(x)
    >>> counter.add([x, y])
    >>> counter.bytes
    64
    """

    def __init__(self, order: Sequence[Instruction], modules: Sequence[nn.Module]) -> None:
        self.order, self.modules = order, modules
        self.kept: dict[int, tuple[int, int]] = {}  # of each stage, and how much of it the inputs are
        first = {each for each in computations_of(order) if each.microbatch == 0}
        again = {replace(each, op=Op.FORWARD) for each in first if each.op == Op.RECOMPUTE}
        self.weighed = {each for each in first if each.op in (Op.FORWARD, Op.RECOMPUTE)} - again

    def watching(self, code: Sequence[BoundCall]) -> list[BoundCall]:
        """The instructions, changed so that the first forward of each stage is measured: the second one, if it is repeated."""
        return [self._measured(instruction, *bound) for instruction, bound in zip(self.order, code)]

    def _measured(self, instruction: Instruction, handle: Callable[..., None], operands: tuple[Any, ...]) -> BoundCall:
        if instruction not in self.weighed:
            return handle, operands
        assert isinstance(instruction, Compute)
        stage = instruction.stage

        def measured(step: Any, *operands: Any) -> None:
            counter, before = ByteCounter(self.modules), set(step.runs)
            with counter.hooks():
                handle(step, *operands)
            inputs = ByteCounter(self.modules)
            for key, run in step.runs.items():
                if key not in before:
                    counter.add(run.held)
                    inputs.add(run.held[0])
            self.kept[stage] = counter.bytes, inputs.bytes

        return measured, operands


class ByteCounter:
    """Counts the bytes of tensors: each piece of memory once, and none that belongs to the modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        own = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        self._own = {_memory(part) for tensor in own for part in plain_parts(tensor)}
        self._found: dict[int, int] = {}
        self._held: list[torch.Tensor] = []  # a held tensor keeps its memory from being used again

    @property
    def bytes(self) -> int:
        """The sum."""
        return sum(self._found.values())

    def add(self, values: Any) -> None:
        """Count the tensors in these values."""
        for tensor in tensors(values):
            self._count(tensor)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, the tensors that autograd saves are counted."""
        with torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor):
            yield

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        for part in plain_parts(tensor):
            memory = _memory(part)
            if memory not in self._own:
                self._held.append(part.detach())
                self._found[memory] = max(self._found.get(memory, 0), part.nbytes)
        return tensor


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
