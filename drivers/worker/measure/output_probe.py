"""Finds outputs that have as many rows as a micro-batch by chance: a matrix of rows by rows, a number for each feature.

In a first step, a stage that returns something runs once more, with one row more than the first micro-batch has. What has the
rows of the micro-batch in front has one row more then, and is otherwise of the same shape.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import nn

from pippy.drivers.batch.division import Division
from pippy.drivers.worker.measure.leave_unchanged import left_unchanged
from pippy.drivers.worker.measure.output_sample import Sample, sample_of
from pippy.ir.base.trees import leaves, map_leaves


class Call(Protocol):
    """A stage that can be run."""

    @property
    def module(self) -> nn.Module: ...

    def run(self, inputs: Sequence[Any]) -> Any: ...


class OutputProbe:
    """One check, in one step. ``by_chance`` has the values that it found, and the numbers of the tensors in them."""

    def __init__(self, division: Division) -> None:
        self.division = division
        self.by_chance: list[tuple[str, int]] = []

    def see(
        self,
        call: Call,
        names: Sequence[str],
        inputs: Sequence[Any],
        outputs: dict[str, Any],
        returned: Collection[str],
    ) -> None:
        """Take the inputs and outputs of a stage for the first micro-batch."""
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
