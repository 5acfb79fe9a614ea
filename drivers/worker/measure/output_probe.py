"""Finds outputs that have as many rows as a micro-batch by chance: a matrix of rows by rows, a number for each feature.

In a first step, a stage that returns something runs once more, with one row more than the first micro-batch has. What has the
rows of the micro-batch in front has one row more then, and is otherwise of the same shape.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from pippy.drivers.batch.division import Division
from pippy.drivers.plan.language.instructions import Instruction, Op
from pippy.drivers.worker.measure.calls import BoundCall, with_calls
from pippy.drivers.worker.measure.leave_unchanged import left_unchanged
from pippy.drivers.worker.measure.output_sample import Sample, sample_of
from pippy.ir.base.names import LOSS
from pippy.ir.base.trees import leaves, map_leaves


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
        self,
        call: Any,
        names: Sequence[str],
        inputs: Sequence[Any],
        outputs: dict[str, Any],
        returned: Collection[str],
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
