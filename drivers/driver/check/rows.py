"""A few rows of a mini-batch for trials: as one micro-batch, in the opposite order, and as two uneven micro-batches.

the mini-batch      16 rows
chosen              0 11 15 3 7
turned              7 3 15 11 0
divided             0 11 15 | 3 7
cut elsewhere       3 7 0 | 11 15
edited              the same, where some targets of row 0 are -100

Rows that are alike show little: with labels 3 3 3, every count fits as well as any other, and rows of padding alone compare
nothing. So rows are chosen whose numbers no chosen row has yet, and both halves get some of them. `edited` puts other numbers
into them, such as padding in targets: both answers to each question that a model asks.

labels        5 rows of 6        first edit                  second edit
              3 1 4 1 5 9        3 1 4 -100 -100 -100        3 1 4 1 5 9
              2 6 5 3 5 8        2 6 5 3 5 8                 2 6 5 3 5 8
              ...                ...                         ...
              9 7 9 3 2 3        9 7 9 3 2 3                 -100 -100 9 3 2 3
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count, islice
from typing import Any

import torch

from pippy.drivers.batch.columns import LoadedColumn
from pippy.drivers.batch.division import (
    CutTensor,
    DividedValue,
    Division,
    PerMicrobatch,
    SameForAll,
    divided_leaves,
    for_each_slice,
    map_divided,
)
from pippy.drivers.compare.trial_notes import InputTensor, Question, TrialNotes
from pippy.ir.base.trees import cat, children, leaves, narrow, tensors, with_children

_LOOKED_AT = 32  # rows, to choose a few of them
_LEAVES = 5  # of an argument, to know its kind
_NUMBERS = 64  # of each


@dataclass(frozen=True)
class Edit:
    """Puts numbers into a tensor whose first dimension is its rows. ``values`` are these numbers, for messages."""

    values: tuple[float, ...]
    put: Callable[[torch.Tensor], torch.Tensor]


class CannotCompare(Exception):
    """Raised if rows cannot be compared. The message says why."""


class TriedRows:
    """``count`` rows of a mini-batch. If the user has cut the mini-batch, they are of one micro-batch. A single row is taken
    several times: other numbers are put into some of these rows, as in others.

    >>> from pippy.drivers.batch.divide import divide
    >>> rows = TriedRows(divide({"x": torch.arange(16)}, chunks=4))
    >>> rows.divided(1).take("x", 0), rows.divided(1, turned=True).take("x", 0), rows.divided(2).microbatches("x")
    (tensor([ 0, 11, 15,  3,  7]), tensor([ 7,  3, 15, 11,  0]), [tensor([ 0, 11, 15]), tensor([3, 7])])
    """

    def __init__(self, division: Division, count: int | None = None) -> None:
        if division.sizes is None or division.mask:
            raise CannotCompare("nothing in the mini-batch has rows that are cut")
        leaves = [leaf for value in division.arguments.values() for leaf in divided_leaves(value)]
        pieces = [leaf for leaf in leaves if isinstance(leaf, PerMicrobatch)]
        if any(each.dim is None and any(True for _ in tensors(each.values)) for each in pieces):
            raise CannotCompare("a value comes in pieces, and nothing says where its rows are")
        self.mini_batch = self.division = division
        self.first, rows = 0, division.rows or 0
        least = min(division.sizes)
        if pieces:
            piece = max(division.held, key=division.rows_of)
            self.first, rows = division.starts[piece], division.rows_of(piece)
            self.division = replace(
                division,
                arguments={
                    name: map_divided(lambda leaf: _of_piece(leaf, piece, division), value)
                    for name, value in division.arguments.items()
                },
            )
        few = min(rows, count or (5 if least > 1 and rows > 3 else 3))
        few = few if few > 1 else count or 2  # the only row several times
        spread = [at * (rows - 1) // (few - 1) for at in range(few)]
        self.chosen = _in_halves(_varied(self.division, spread, range(rows)) if rows >= few else spread)
        self.order = list(range(few))  # in which they are taken, once they are edited
        self.edits: Mapping[InputTensor, Edit] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of the two micro-batches."""
        return len(self.chosen) - len(self.chosen) // 2, len(self.chosen) // 2

    def tensors(self) -> Iterator[tuple[InputTensor, torch.Tensor]]:
        """The tensors that have rows, for the rows of the trial; rows are their first dimension."""
        for place, leaf in places_of(self.divided(1)):
            if isinstance(leaf, CutTensor) and leaf.value.layout is torch.strided:
                yield place, leaf.value.movedim(leaf.dim, 0)

    def edited(self, edits: Mapping[InputTensor, Edit]) -> "TriedRows":
        """The same rows, with other numbers in some tensors."""
        found = copy.copy(self)
        found.edits = edits
        return found

    def rotated(self, by: int) -> "TriedRows":
        """The same rows, rotated by so many."""
        found = copy.copy(self)
        found.order = [*self.order[by:], *self.order[:by]]
        return found

    @property
    def key(self) -> Any:
        """The same for the same rows in the same order."""
        return tuple(self.chosen), tuple(self.order), tuple(self.edits.items()), self.division

    def alone(self) -> "TriedRows":
        """The rows of the first micro-batch alone."""
        found = copy.copy(self)
        found.chosen = [self.chosen[at] for at in self.order[: self.sizes[0]]]
        found.order = list(range(len(found.chosen)))
        return found

    def cut_elsewhere(self) -> "TriedRows":
        """The same rows, with other rows in the first micro-batch."""
        return self.rotated(self.sizes[0])

    def divided(self, chunks: int, turned: bool = False) -> Division:
        """The rows as one micro-batch, or as two, each in the slices of the mini-batch.

        With ``turned``, they are in the opposite order.
        """
        sizes = self.sizes if chunks == 2 else (len(self.chosen),)
        starts = tuple(accumulate(sizes[:-1], initial=0))
        slices = self.division.slices if chunks == 2 else 1
        return replace(
            self.division,
            chunks=chunks * slices,
            sizes=for_each_slice(sizes, slices),
            starts=for_each_slice(starts, slices),
            slices=slices,
            arguments={name: self._argument(name, value, turned) for name, value in self.division.arguments.items()},
            share=None,
        )

    def _argument(self, name: str, value: Any, turned: bool) -> Any:
        """An argument, with the rows of the trial."""
        numbers = count()
        return map_divided(lambda leaf: self._taken(leaf, (name, next(numbers)), turned), value)

    def _taken(self, leaf: DividedValue, place: InputTensor, turned: bool) -> DividedValue:
        if isinstance(leaf, CutTensor):
            chosen_rows = _selected(leaf.value, leaf.dim, self.chosen)
            if place in self.edits:
                chosen_rows = self.edits[place].put(chosen_rows.movedim(leaf.dim, 0).clone()).movedim(0, leaf.dim)
            return replace(leaf, value=_selected(chosen_rows, leaf.dim, self.order[::-1] if turned else self.order))
        if isinstance(leaf, LoadedColumn):
            indices = [index for batch in leaf.batches for index in batch.indices]
            order = self.order[::-1] if turned else self.order
            chosen = [indices[self.first + self.chosen[at]] for at in order]
            return replace(leaf, batches=(replace(leaf.batches[0], indices=chosen, ahead=()),), counts=())
        return leaf


class WholeRows(TriedRows):
    """All rows of a mini-batch, in the micro-batches that the user asks for.

    >>> from pippy.drivers.batch.divide import divide
    >>> rows = WholeRows(divide({"x": torch.arange(5)}, chunks=3))
    >>> rows.divided(1).take("x", 0), rows.divided(2).microbatches("x")
    (tensor([0, 1, 2, 3, 4]), [tensor([0, 1]), tensor([2, 3]), tensor([4])])
    """

    def __init__(self, division: Division) -> None:
        self.mini_batch = self.division = division
        self.first = 0
        self.chosen = self.order = list(range(division.rows or 1))
        self.edits = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of the micro-batches."""
        return self.division.sizes or (1,) * self.division.chunks

    def rotated(self, by: int) -> "TriedRows":
        """The same rows: the user has said how they are cut."""
        return self

    def divided(self, chunks: int, turned: bool = False) -> Division:
        """The mini-batch as the user has cut it, or as one micro-batch."""
        cut = self.division if chunks > 1 else self.division.uncut()
        if not self.edits and not turned:
            return cut
        return replace(
            cut, arguments={name: self._argument(name, each, turned) for name, each in cut.arguments.items()}
        )

    def alone(self) -> "TriedRows":
        """All rows."""
        return self


def _of_piece(leaf: DividedValue, piece: int, division: Division) -> Any:
    """A value of one micro-batch, as that of a mini-batch; where it holds several, a tree of these."""
    if isinstance(leaf, CutTensor):
        rows = division.rows_of(piece)
        return replace(leaf, value=narrow(leaf.value, leaf.dim, division.starts[piece] - division.first_row, rows))
    if not isinstance(leaf, PerMicrobatch):
        return leaf
    dim, rows = leaf.dim, division.rows_of(piece)

    def divided(value: Any) -> Any:
        items = children(value)
        if items:
            return with_children(value, list(map(divided, items)))
        has_rows = (
            isinstance(value, torch.Tensor) and dim is not None and value.dim() > dim and value.shape[dim] == rows
        )
        return CutTensor(value.detach(), dim, value.requires_grad) if has_rows else SameForAll(value)  # type: ignore[arg-type]

    return divided(leaf.values[piece - division.held.start])


def places_of(division: Division) -> Iterator[tuple[InputTensor, DividedValue]]:
    """The values of a mini-batch, each with its place."""
    for name, value in division.arguments.items():
        for number, leaf in enumerate(divided_leaves(value)):
            yield (name, number), leaf


def _varied(division: Division, spread: Sequence[int], rows: range) -> list[int]:
    """Choose as many rows as in ``spread``, first those with new numbers. Of rows that are equally new, those in ``spread``."""
    others = rows[:: max(1, len(rows) // _LOOKED_AT)]
    candidates = list(dict.fromkeys([*spread, *others]))
    kinds = [_numbers(leaf, candidates) for _, leaf in places_of(division)]
    held = [[numbers[at] for numbers in kinds if numbers] for at in range(len(candidates))]
    seen: Counter[tuple[int, float]] = Counter()
    left, chosen = list(range(len(candidates))), []
    for _ in spread:
        best = max(left, key=lambda at: sum(_news(seen, kind, each) for kind, each in enumerate(held[at])))
        left.remove(best)
        chosen.append(candidates[best])
        seen.update((kind, number) for kind, each in enumerate(held[best]) for number in each)
    return chosen


def _news(seen: Mapping[tuple[int, float], int], kind: int, numbers: Collection[float]) -> float:
    """How new the numbers of a row are: 1 if no chosen row has one of them, and less the more of them do."""
    return sum(1 / (1 + seen.get((kind, number), 0)) for number in numbers) / max(1, len(numbers))


def _numbers(leaf: DividedValue, rows: Sequence[int]) -> list[set[float]]:
    """Numbers in each of the rows, or some of them; nothing if they cannot be read."""
    if not isinstance(leaf, CutTensor) or leaf.value.layout is not torch.strided or leaf.value.is_complex():
        return []
    value = leaf.value.detach()
    step = value.numel() // max(1, value.shape[leaf.dim] * _NUMBERS) + 1
    some = torch.stack([value.select(leaf.dim, row).reshape(-1)[::step] for row in rows]).cpu()
    if some.is_floating_point():
        some = some.double().nan_to_num()
    return [set(row) for row in some.tolist()]


def _in_halves(chosen: Sequence[int]) -> list[int]:
    """Order the rows so that both micro-batches have some of those chosen first: 1 4 5 | 2 3."""
    if len(chosen) == 3:
        return [chosen[0], chosen[2], chosen[1]]
    first = [row for at, row in enumerate(chosen) if at % 4 in (0, 3)]
    return [*first, *(row for at, row in enumerate(chosen) if at % 4 in (1, 2))]


def _selected(tensor: torch.Tensor, dim: int, rows: Sequence[int]) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return cat([narrow(tensor, dim, row, 1) for row in rows], dim)
    return tensor.index_select(dim, torch.tensor([*rows], device=tensor.device))


def edited(rows: TriedRows, asked: TrialNotes, target: str | None) -> Iterator[TriedRows]:
    """The rows with other numbers, edited in two ways; none if the model asks nothing."""
    values: dict[InputTensor, tuple[float, ...]] = {}
    for place, tensor in rows.tensors():
        values_to_put = tuple(_values(place, tensor, asked.questions, target))
        if values_to_put:
            values[place] = values_to_put[: max(1, len(tensor) // 2)]
    if values:
        for second in (False, True):
            put = partial(_put, second=second)
            yield rows.edited({place: Edit(each, partial(put, values=each)) for place, each in values.items()})


def made_unlike(rows: TriedRows, target: str | None) -> TriedRows | None:
    """The rows, where those that are alike in all inputs, as rows of padding are, have other numbers. None if none are alike,
    as far as some numbers of each show.

    Rows that are alike tie: whatever forward chooses by a threshold, it chooses all of them or none. Inputs are turned, so
    that other rows have the targets that count.

    >>> from pippy.drivers.batch.divide import divide
    >>> found = made_unlike(WholeRows(divide({"x": torch.tensor([[1, 2, 3], [0, 0, 0], [0, 0, 0]])}, chunks=2)), None)
    >>> found.divided(1).take("x", 0)
    tensor([[2, 3, 1],
            [0, 0, 0],
            [1, 2, 3]])
    """
    given = {
        place: _some_of_each(value)
        for place, value in rows.tensors()
        if place[0] != target and value.numel() and not value.is_complex()
    }
    firsts: dict[Any, int] = {}
    kinds = zip(*map(_kinds_of_rows, given.values()))
    alike = [row for row, kind in enumerate(kinds) if firsts.setdefault(kind, row) != row]
    varied = {place: value for place, value in given.items() if _has_numbers(value)}
    if not alike or not varied:
        return None
    puts = {}
    for place, value in given.items():
        donor = max(firsts.values(), key=lambda row: len(value[row].unique()))
        puts[place] = Edit((), partial(_put_others, alike=alike if place in varied else (), donor=donor))
    return rows.edited(puts)


def _some_of_each(value: torch.Tensor) -> torch.Tensor:
    """Some numbers of each row."""
    flat = value.detach().reshape(len(value), -1)
    return flat[:, :: flat.shape[1] // _NUMBERS + 1].cpu()


def _kinds_of_rows(value: torch.Tensor) -> list[int]:
    """A number for each row: equal rows have the same."""
    return torch.unique(value, dim=0, return_inverse=True)[1].tolist()


def _has_numbers(value: torch.Tensor) -> bool:
    """Whether a tensor holds more than the two numbers of a mask, which other numbers would not be."""
    return value.dtype != torch.bool and len(value[:_LOOKED_AT].unique()) > 2


def _put_others(tensor: torch.Tensor, alike: Sequence[int], donor: int) -> torch.Tensor:
    """Put the numbers of one row into those that are alike: rolled and, if they need not be integers, smaller each time."""
    numbers = tensor[donor].reshape(-1)
    for at, row in enumerate(alike):
        rolled = numbers.roll(-1 - at)
        if tensor.is_floating_point():
            rolled = rolled * (1 - (at + 1) / (2 * len(alike) + 2))
        tensor[row] = rolled.reshape(tensor[row].shape)
    return tensor.flip(0)


def _values(
    place: InputTensor, tensor: torch.Tensor, questions: Sequence[Question], target: str | None
) -> Iterator[float]:
    """The numbers to put into a tensor: those with the other answer to each question about it."""
    if tensor.dtype == torch.bool:
        yield False
        return
    index = not (tensor.is_floating_point() or tensor.is_complex())
    for question in questions:
        asked = question.place == place or (question.place is None and index and target == place[0])
        for value in question.examples() if asked else ():
            if not (index and tensor.is_cuda) or question.counted or 0 <= value <= int(tensor.max()):
                yield value  # a GPU does not recover from an index that is out of range
    if not index and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
        yield float(tensor.flatten()[0]) / 2 or 0.5  # weights that are all alike, say
    if index and (place[0] == target or any(question.place == place for question in questions)):
        left_out = [question.value for question in questions]
        others = {number for number in tensor.unique().tolist() if number not in left_out}
        if len(others) == 1 and (only := others.pop()) > 0:
            yield only // 2  # labels that are all alike


def _put(tensor: torch.Tensor, values: Sequence[float], second: bool) -> torch.Tensor:
    """Put the numbers in turn into the first rows, or into the last ones. In a row of several numbers, a half is replaced."""
    rows = range(len(tensor) - 1, -1, -1) if second else range(len(tensor))
    for row, value in zip(rows, values):
        places = tensor[row].reshape(-1)
        half = slice(None, (places.numel() + 1) // 3 or None) if second else slice(places.numel() // 2, None)
        places[half] = value
        tensor[row] = places.reshape(tensor[row].shape)
    return tensor


def kinds_of(value: Any) -> Any:
    """The kind of an argument, all that decides how it is cut: classes, dtypes, dimensions, and values that are no tensors."""
    return tuple(_kind_of_leaf(leaf) for leaf in divided_leaves(value))


def _kind_of_leaf(leaf: DividedValue) -> Any:
    its = islice(leaves(leaf.held()), _LEAVES)
    kinds = [(each.dtype, each.dim()) if isinstance(each, torch.Tensor) else _constant(each) for each in its]
    return type(leaf), getattr(leaf, "dim", None), tuple(kinds)


def _constant(value: Any) -> Any:
    return value if isinstance(value, (bool, str, int)) else type(value)
