"""A few rows of a mini-batch, to try a step with: as one micro-batch, in another order, and as two uneven ones.

the mini-batch      16 rows
chosen              0 3 7 11 15
turned              15 11 7 3 0
divided             0 3 7 | 11 15
edited              the same, where some targets of row 0 are -100
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, count

import torch

from pippy.drivers.batches.columns import LoadedColumn
from pippy.drivers.batches.division import (
    CutTensor,
    DividedValue,
    Division,
    PerMicrobatch,
    SameForAll,
    divided_leaves,
    map_divided,
)
from pippy.drivers.trials.asked import Place
from pippy.ir.sparse_tensors import cat, narrow
from pippy.ir.trees import map_tensors, tensors

Edit = Callable[[torch.Tensor], torch.Tensor]  # of a tensor with its rows in front


class NoRows(Exception):
    """A mini-batch of which no rows can be tried."""


class TriedRows:
    """A few rows of a mini-batch, ``count`` of them, of one micro-batch alone where the user has cut the rows.

    >>> from pippy.drivers.batches.divide import divide
    >>> rows = TriedRows(divide({"x": torch.arange(16)}, chunks=4))
    >>> rows.divided(1).take("x", 0), rows.divided(1, turned=True).take("x", 0), rows.divided(2).microbatches("x")
    (tensor([ 0,  3,  7, 11, 15]), tensor([15, 11,  7,  3,  0]), [tensor([0, 3, 7]), tensor([11, 15])])
    """

    def __init__(self, division: Division, count: int | None = None) -> None:
        if division.sizes is None or division.mask:
            raise NoRows("nothing in the mini-batch has rows that are cut")
        leaves = [leaf for value in division.arguments.values() for leaf in divided_leaves(value)]
        pieces = [leaf for leaf in leaves if isinstance(leaf, PerMicrobatch)]
        self.division = division
        self.piece = max(division.held, key=division.rows_of) if pieces else None
        if any(each.dim is None and any(True for _ in tensors(each.values)) for each in pieces):
            raise NoRows("a value comes in pieces, and nothing says where its rows are")
        least = min(division.sizes)
        self.first, rows = 0, sum(division.sizes)
        if self.piece is not None:
            self.first, rows = division.starts[self.piece], division.rows_of(self.piece)
        few = min(rows, count or (5 if least > 1 and rows > 3 else 3))
        if few < 2:
            raise NoRows("there is a single row")
        self.chosen = [self.first + at * (rows - 1) // (few - 1) for at in range(few)]
        self.edits: Mapping[Place, Edit] = {}

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows of the two micro-batches."""
        return len(self.chosen) - len(self.chosen) // 2, len(self.chosen) // 2

    def tensors(self) -> Iterator[tuple[Place, torch.Tensor]]:
        """The tensors that have rows, those of the tried rows, with the rows in front."""
        for place, leaf in places_of(self.divided(1)):
            if isinstance(leaf, CutTensor) and leaf.value.layout is torch.strided:
                yield place, leaf.value.movedim(leaf.dim, 0)

    def edited(self, edits: Mapping[Place, Edit]) -> "TriedRows":
        """The same rows, with other numbers in some tensors."""
        found = copy.copy(self)
        found.edits = edits
        return found

    def rotated(self, by: int) -> "TriedRows":
        """The same rows, of which others come first."""
        found = copy.copy(self)
        found.chosen = [*self.chosen[by:], *self.chosen[:by]]
        return found

    def with_argument(self, name: str, spec: Callable[[DividedValue], DividedValue]) -> "TriedRows":
        """The same rows of a mini-batch of which one argument is divided in another way."""
        arguments = {**self.division.arguments, name: map_divided(spec, self.division.arguments[name])}
        found = copy.copy(self)
        found.division = replace(self.division, arguments=arguments)
        return found

    def divided(self, chunks: int, turned: bool = False) -> Division:
        """The rows as one micro-batch or as two; ``turned``: in the contrary order."""
        sizes = self.sizes if chunks == 2 else (len(self.chosen),)
        starts = tuple(accumulate(sizes[:-1], initial=0))
        arguments = {}
        for name, value in self.division.arguments.items():
            places = _places(name)
            arguments[name] = map_divided(lambda leaf: self._taken(leaf, next(places), sizes, turned), value)  # noqa: B023
        return replace(self.division, chunks=chunks, sizes=sizes, starts=starts, arguments=arguments, share=None)

    def _taken(self, leaf: DividedValue, place: Place, sizes: Sequence[int], turned: bool) -> DividedValue:
        if isinstance(leaf, CutTensor):
            found = _rows_of(leaf.value, leaf.dim, self.chosen)
            if place in self.edits:
                found = self.edits[place](found.movedim(leaf.dim, 0).clone()).movedim(0, leaf.dim)
            return replace(leaf, value=_rows_of(found, leaf.dim, range(len(self.chosen))[::-1]) if turned else found)
        if isinstance(leaf, LoadedColumn):
            indices = [index for batch in leaf.batches for index in batch.indices]
            chosen = [indices[row] for row in self._in_order(turned)]
            return replace(leaf, batches=(replace(leaf.batches[0], indices=chosen, ahead=()),), counts=())
        if isinstance(leaf, PerMicrobatch):
            assert self.piece is not None
            value = leaf.values[self.piece - self.division.held.start]
            if leaf.dim is None:
                return SameForAll(value)
            order, dim = [row - self.first for row in self._in_order(turned)], leaf.dim
            parts = [order[: sizes[0]], order[sizes[0] :]][: len(sizes)]
            rows = self.division.rows_of(self.piece)
            return PerMicrobatch(tuple(map_tensors(partial(_cut, dim, rows, part), value) for part in parts), dim)
        return leaf

    def _in_order(self, turned: bool) -> list[int]:
        return self.chosen[::-1] if turned else self.chosen


def places_of(division: Division) -> Iterator[tuple[Place, DividedValue]]:
    """The values of a mini-batch, each with its place."""
    for name, value in division.arguments.items():
        for number, leaf in enumerate(divided_leaves(value)):
            yield (name, number), leaf


def _places(name: str) -> Iterator[Place]:
    """A place for each value in an argument, in their order."""
    return ((name, number) for number in count())


def _cut(dim: int, rows: int, chosen: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """The chosen ones of the rows of a tensor, if it has rows."""
    return _rows_of(tensor, dim, chosen) if tensor.dim() > dim and tensor.shape[dim] == rows else tensor


def _rows_of(tensor: torch.Tensor, dim: int, rows: Sequence[int]) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return cat([narrow(tensor, dim, row, 1) for row in rows], dim)
    return tensor.index_select(dim, torch.tensor([*rows], device=tensor.device))
