"""Dividing the sequences of a call into slices: each micro-batch of rows becomes as many micro-batches as there are slices.

    input_ids        0 1 2 3 4 5 6 7        0 1 2 3 | 4 5 6 7
    labels           0 1 2 3 4 5 6 7        1 2 3 4 | 5 6 7 -100      shift_labels: those of the next tokens
    attention_mask   1 1 1 1 1 1 1 1        1 1 1 1 | 1 1 1 1 1 1 1 1
    position_ids                            0 1 2 3 | 4 5 6 7

The Pipe of a slice takes more than the Pipe that the user has made. What the user does not give is made here: a mask of ones,
and the positions of all tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F

from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.divide import divide
from pippy.drivers.batch.divide_call import check_guards_of
from pippy.drivers.batch.division import CutTensor, Division, SlicedTensor, for_each_slice
from pippy.drivers.batch.loss_weights import IGNORED
from pippy.drivers.batch.merge import LOSS_PLACE
from pippy.drivers.batch.specs import MicroBatches
from pippy.ir.base.errors import SliceError
from pippy.ir.base.readable import brief, count_with_noun
from pippy.ir.base.trees import children, describe, with_children
from pippy.ir.call.signature import bind
from pippy.ir.record.compiled import Compiled
from pippy.ir.trace.language_models import IDS, LABELS, MASK, NEXT_LABELS, POSITIONS


def count_next_labels(*, shift_labels: torch.Tensor) -> torch.Tensor:
    """What a slice counts in the loss of a model of transformers: the labels of next tokens that are not ignored."""
    return (shift_labels != IGNORED).sum()


@dataclass(frozen=True)
class SlicedCalls:
    """The calls of a driver that cuts sequences into so many slices. ``whole`` is the Pipe that the user has made, compiled."""

    slices: int
    whole: Compiled

    @property
    def makes_loss(self) -> bool:
        """Whether the loss is the model's own, of labels."""
        return LABELS in self.whole.wiring.inputs and self.whole.loss_module is None

    def divide(self, compiled: Compiled, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Division:
        """Divide the arguments of a call of the user's for the Pipe of a slice, ``compiled``: ``chunks`` rows of slices."""
        names = {node.name: str(node.target) for node in compiled.placeholders()}
        given, sizes = self._whole(bind(self.whole, args, kwargs), chunks)
        values = self._values(given)
        division = divide(
            {name: values[user] for name, user in names.items()},
            chunks,
            names={user: name for name, user in names.items()},
        )
        if sizes is not None:
            division = replace(division, sizes=sizes, starts=tuple(accumulate(sizes[:-1], initial=0)))
        assert division.sizes is not None
        division = Division(
            chunks * self.slices,
            for_each_slice(division.sizes, self.slices),
            {name: _sliced(leaf, grows=names[name] == MASK) for name, leaf in division.arguments.items()},
            division.names,
            starts=for_each_slice(division.starts, self.slices),
            slices=self.slices,
        )
        check_guards_of(compiled, division)
        return division

    def _whole(self, given: Mapping[str, Any], chunks: int) -> tuple[dict[str, Any], tuple[int, ...] | None]:
        """The values of a call, with one tensor for what comes in pieces, and the rows of these, if something does."""
        pieces = {name: value.values for name, value in given.items() if isinstance(value, MicroBatches)}
        shapes = {name: [_shape(each) for each in its] for name, its in pieces.items()}
        if not shapes:
            return dict(given), None
        first = next(iter(shapes.values()))
        lengths = {shape[1:] for shape in first}
        alike = all(its == first and given[name].dim == 0 for name, its in shapes.items())
        if not alike or len(lengths) > 1 or () in lengths or len(first) != chunks:
            raise SliceError(
                f"slices={self.slices} cuts {', '.join(map(repr, pieces))} given as {brief(given[next(iter(pieces))])}, and "
                f"needs {count_with_noun(chunks, 'micro-batch')} of sequences of one length, with the same rows in each "
                "argument; pad them to one length"
            )
        joined = {name: torch.cat(its) for name, its in pieces.items()}
        return {**given, **joined}, tuple(rows for rows, *_ in first)

    def _values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The whole value of each input of a slice, by the user's name."""
        ids = given[IDS]
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
            raise SliceError(
                f"slices={self.slices} cuts {IDS}, which is {describe(ids)}; give the ids of tokens, an integer tensor of "
                "[rows, length], and no rows that workers load"
            )
        rows, length = ids.shape
        self._check_length(length)
        made = {
            MASK: torch.ones_like(ids, dtype=torch.long),
            POSITIONS: torch.arange(length, device=ids.device).expand(rows, -1),
        }
        values = {**made, **{name: value for name, value in given.items() if value is not None}}
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) or value.shape[:2] != ids.shape:
                raise SliceError(
                    f"slices={self.slices} cuts {name} along dimension 1, but it is {describe(value)}, and {IDS} is "
                    f"{describe(ids)}; give a tensor whose first dimensions are the rows and the length of the sequences"
                )
        if given.get(MASK) is None:
            self._check_not_packed(values[POSITIONS])
        if LABELS in values:
            values[NEXT_LABELS] = F.pad(values[LABELS], (0, 1), value=IGNORED)[:, 1:]
        return values

    def _check_not_packed(self, positions: torch.Tensor) -> None:
        """Refuse what models of transformers take for several documents in a row, which they do only without a cache."""
        if not positions.is_meta and bool((positions.diff(dim=1) != 1).any()):
            raise SliceError(
                f"{POSITIONS} do not count up by one, so a row holds several documents one behind the other, and slices="
                f"{self.slices} would let each attend to those before it; give each document a row of its own, or leave "
                "slices= out"
            )

    def _check_length(self, length: int) -> None:
        if length % self.slices or length < 2 * self.slices:
            fitting = [count for count in range(2, length // 2 + 1) if length % count == 0]
            nearest = min(fitting, key=lambda count: abs(count - self.slices), default=None)
            remedy = "" if nearest is None else f", or make the driver with another number, as in slices={nearest}"
            raise SliceError(
                f"a sequence of {count_with_noun(length, 'token')} cannot be cut into slices={self.slices} of the same length, "
                f"each of 2 tokens or more; pad the sequences to a multiple of {self.slices}{remedy}"
            )


def _shape(value: Any) -> tuple[int, ...]:
    """The rows and the length of sequences; less if there are none."""
    return tuple(value.shape[:2]) if isinstance(value, torch.Tensor) else ()


def _sliced(leaf: Any, grows: bool) -> SlicedTensor:
    assert isinstance(leaf, CutTensor)
    return SlicedTensor(leaf.value, leaf.dim, leaf.requires_grad, grows)


# Joins what the slices of a row give to what the row gives.


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
