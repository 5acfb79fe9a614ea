"""Joins what the slices of a row give to what the row gives."""

from collections.abc import Sequence
from typing import Any

import torch

from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.division import Division, SlicedTensor
from pippy.drivers.batch.merge import LOSS_PLACE
from pippy.ir.base.trees import children, describe, with_children


def joined_slices(outputs: Sequence[Any], division: Division) -> list[Any]:
    """The outputs of rows, from those of the micro-batches of a division: tensors are joined along their sequences."""
    if division.slices == 1:
        return list(outputs)
    lengths = [
        each.value.shape[1] // division.slices for each in division.arguments.values() if isinstance(each, SlicedTensor)
    ]
    starts = range(0, division.chunks, division.slices)
    return [_joined(outputs[start : start + division.slices], division.rows_of(start), lengths[0]) for start in starts]


def _joined(parts: Sequence[Any], rows: int, length: int) -> Any:
    first = parts[0]
    held = children(first)
    if held is not None:
        columns = zip(*[children(part) or () for part in parts], strict=True)
        return with_children(first, [_joined(column, rows, length) for column in columns])
    if first is LOSS_PLACE or first is None:
        return first
    if isinstance(first, torch.Tensor) and all(each.shape[:2] == (rows, length) for each in parts):
        return torch.cat(list(parts), dim=1)
    raise MicrobatchError(
        f"the model returns {describe(first)} for a slice of {length} tokens of {rows} rows, and it is not known how such "
        "values of slices are joined; ask for the loss alone: driver.run(..., outputs=False)"
    )
