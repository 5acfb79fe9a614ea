"""Finds outputs that have as many rows as a micro-batch by chance: a matrix of rows by rows, a number for each feature.

In a first step, a stage that returns something runs once more, with one row more than the first micro-batch has. What has the
rows of the micro-batch in front has one row more then, and is otherwise of the same shape.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from pippy.drivers.batch.division import CutTensor, DividedValue, Division, PerMicrobatch
from pippy.drivers.plan.language.instructions import Instruction, Op
from pippy.drivers.worker.measure.calls import BoundCall, with_calls
from pippy.drivers.worker.measure.leave_unchanged import left_unchanged
from pippy.ir.base.names import LOSS
from pippy.ir.base.trees import cat, children, has_rows, leaves, map_leaves, narrow

Place = tuple[int, int]  # of a tensor: the number of the input, and of the value in it


@dataclass(frozen=True)
class Sample:
    """Inputs of a stage. Each tensor has its rows, or several values for each, along its ``dims``; None if it has none."""

    inputs: tuple[Any, ...]
    dims: tuple[int | None, ...]
    rows: int

    def longer(self) -> "Sample":
        """One row more: the last one twice, in tensors of their own."""

        def longer(place: Place, leaf: torch.Tensor, dim: int | None) -> torch.Tensor:
            if dim is None:
                return leaf.clone()
            size = leaf.shape[dim]
            each = size // self.rows
            return cat([leaf, narrow(leaf, dim, size - each, each)], dim)

        return replace(self.mapped(longer), rows=self.rows + 1)

    def mapped(self, function: Callable[[Place, torch.Tensor, int | None], torch.Tensor]) -> "Sample":
        """The same with other tensors: ``function`` takes the place of each, the tensor and its dimension."""
        dims = iter(self.dims)

        def one(place: Place, leaf: Any) -> Any:
            dim = next(dims)
            return function(place, leaf, dim) if isinstance(leaf, torch.Tensor) else leaf

        inputs = []
        for number, value in enumerate(self.inputs):
            places = ((number, index) for index in count())
            inputs.append(map_leaves(lambda leaf, places=places: one(next(places), leaf), value))  # type: ignore[misc]
        return replace(self, inputs=tuple(inputs))

    def tensors(self) -> Iterator[tuple[Place, torch.Tensor, int | None]]:
        """The tensors, with their places and dimensions."""
        dims = iter(self.dims)
        for number, value in enumerate(self.inputs):
            for index, leaf in enumerate(leaves(value)):
                dim = next(dims)
                if isinstance(leaf, torch.Tensor):
                    yield (number, index), leaf, dim


def sample_of(inputs: Sequence[Any], names: Sequence[str], given: Collection[str], division: Division) -> Sample:
    """A sample of the first micro-batch. ``names`` are those of the inputs, and ``given`` those that the user gave."""
    rows = division.rows_of(0)
    known = {
        name: list(_dims_given(division.arguments[name], value)) for name, value in zip(names, inputs) if name in given
    }
    likely = [*(dim for dims in known.values() for dim in dims if dim is not None), 0]
    dims: list[int | None] = []
    for name, value in zip(names, inputs):
        dims += known[name] if name in known else [_dim_of(leaf, rows, likely) for leaf in leaves(value)]
    return Sample(tuple(inputs), tuple(dims), rows)


def _dims_given(divided: Any, value: Any) -> Iterator[int | None]:
    """Where each tensor of an input has its rows."""
    if isinstance(divided, CutTensor):
        yield divided.dim
    elif isinstance(divided, PerMicrobatch):
        fits = [
            isinstance(leaf, torch.Tensor) and divided.dim is not None and leaf.dim() > divided.dim
            for leaf in leaves(value)
        ]
        yield from (divided.dim if each else None for each in fits)
    elif isinstance(divided, DividedValue) or children(value) is None:
        yield from (None for _ in leaves(value))
    else:
        for item, its in zip(children(divided) or (), children(value) or ()):
            yield from _dims_given(item, its)


def _dim_of(leaf: Any, rows: int, likely: Sequence[int]) -> int | None:
    """Where a computed tensor has its rows, or several values for each row."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or not has_rows(leaf):
        return None
    exact = [dim for dim in likely if dim < leaf.dim() and leaf.shape[dim] == rows]
    if exact:
        return exact[0]
    return 0 if leaf.shape[0] and leaf.shape[0] % rows == 0 else None


class OutputProbe:
    """One check, in one step. ``by_chance`` has the values that it found, and the numbers of the tensors in them."""

    def __init__(self, order: Sequence[Instruction], division: Division) -> None:
        self.order, self.division = order, division
        self.by_chance: list[tuple[str, int]] = []

    def watching(self, code: Sequence[BoundCall]) -> list[BoundCall]:
        """The instructions, changed so that this sees what each stage takes and gives of the first micro-batch."""
        return with_calls(self.order, code, (Op.FORWARD,), self._probing, microbatch=0)

    def _probing(self, handle: Callable[..., None]) -> Callable[..., None]:
        def probing(step: Any, call: Any, microbatch: int, takes: Sequence[Any], gives: Sequence[Any]) -> None:
            handle(step, call, microbatch, takes, gives)
            if call.name != LOSS:
                inputs, outputs = [step.values[key] for key in takes], {name: step.values[name, 0] for name, _ in gives}
                self._see(call, [name for name, _ in takes], inputs, outputs, step.returned)

        return probing

    def _see(
        self, call: Any, names: Sequence[str], inputs: Sequence[Any], outputs: dict[str, Any], returned: Collection[str]
    ) -> None:
        if self.division.sizes is None or not any(name in returned for name in outputs):
            return
        detached = tuple(
            map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, v) for v in inputs
        )
        given = [name for name in names if name in self.division.arguments]
        sample = sample_of(detached, names, given, self.division)
        if not _says_its_rows(sample):
            return
        with suppress(Exception), torch.no_grad(), left_unchanged(call.module):
            more = call.run(sample.longer().inputs)
            longer = dict(zip(outputs, [more] if len(outputs) == 1 else more, strict=True))
            self.by_chance += [
                (name, number)
                for name, value in outputs.items()
                if name in returned
                for number in _by_chance(value, longer[name], sample.rows)
            ]


def _says_its_rows(sample: Sample) -> bool:
    """Whether all that depends on the number of rows is known: a tensor's dimension is; a number may be anything."""
    values = [leaf for value in sample.inputs for leaf in leaves(value) if not isinstance(leaf, torch.Tensor)]
    if any(leaf is not None and not isinstance(leaf, (bool, str)) for leaf in values):
        return False
    unknown = (leaf for _, leaf, dim in sample.tensors() if dim is None)
    return any(dim is not None for dim in sample.dims) and not any(
        size % sample.rows == 0 for leaf in unknown for size in leaf.shape
    )


def _by_chance(value: Any, longer: Any, rows: int) -> Iterator[int]:
    for number, (one, more) in enumerate(zip(leaves(value), leaves(longer), strict=True)):
        has_rows = isinstance(one, torch.Tensor) and one.dim() and one.shape[0] == rows
        if has_rows and tuple(more.shape) != (rows + 1, *one.shape[1:]):
            yield number
