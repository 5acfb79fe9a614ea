"""A mini-batch and how it is divided into micro-batches: plain data, which travels to the workers.

    x: [8, 4], mask: [4, 4], scale: 2     divide, 3 chunks      CutTensor([8, 4], dim 0) · SameForAll([4, 4]) · SameForAll(2)
    one value for each input           ─────────────────────▶   whole values, and how to cut them: sizes 3 3 2
                                           take, by a worker    x[0:3], mask, 2 · x[3:6], mask, 2 · x[6:8], mask, 2

The controller sends each value whole, and a worker cuts it. So the controller's work and its messages do not grow with the
number of micro-batches. Only what a spec of the user's cuts, and what was given in pieces, is sent in pieces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from pippy.ir.base.trees import children, leaves, map_tensors, narrow, tensors, with_children


@dataclass(frozen=True, eq=False)
class DividedValue:
    """A value that an argument is or holds, and how it is divided. If it is ``loaded``, a worker loads it, and divides it."""

    loaded: ClassVar[bool] = False

    def take(self, microbatch: int, division: "Division") -> Any:
        """The value for one micro-batch."""
        raise NotImplementedError

    def held(self) -> Any:
        """All that is held of it."""
        return getattr(self, "value", None)

    def part(self, division: "Division") -> "DividedValue":
        """What those need that take only the micro-batches that ``division`` holds."""
        return self


@dataclass(frozen=True, eq=False)
class SameForAll(DividedValue):
    """The same object for every micro-batch."""

    value: Any
    requires_grad: bool = False  # of what was given; ``value`` is detached, so that its graph does not travel along

    def take(self, microbatch: int, division: "Division") -> Any:
        return self.value.detach().requires_grad_() if self.requires_grad else self.value


@dataclass(frozen=True, eq=False)
class CutTensor(DividedValue):
    """A tensor of which each micro-batch gets its rows: a view, or of a sparse tensor a copy."""

    value: torch.Tensor
    dim: int
    requires_grad: bool = False

    def take(self, microbatch: int, division: "Division") -> torch.Tensor:
        if division.chunks == 1:
            return self.value.detach().requires_grad_(self.requires_grad)
        start, size = division.starts[microbatch] - division.first_row, division.rows_of(microbatch)
        piece = narrow(self.value, self.dim, start, size)
        if division.mask:
            masked = torch.zeros_like(self.value)
            masked.narrow(self.dim, start, size).copy_(piece)
            piece = masked
        return piece.requires_grad_() if self.requires_grad else piece

    def part(self, division: "Division") -> "CutTensor":
        rows = sum(division.rows_of(microbatch) for microbatch in division.held)
        return replace(self, value=narrow(self.value, self.dim, division.first_row, rows))


@dataclass(frozen=True, eq=False)
class SlicedTensor(CutTensor):
    """A tensor of sequences along dimension 1: each micro-batch gets a slice of its rows, or with ``grows`` all up to it."""

    grows: bool = False

    def take(self, microbatch: int, division: "Division") -> torch.Tensor:
        rows = super().take(microbatch, division)
        number, length = microbatch % division.slices, rows.shape[1] // division.slices
        start = 0 if self.grows else number * length
        return rows.narrow(1, start, (number + 1) * length - start)

    def part(self, division: "Division") -> "SlicedTensor":
        rows = sum(division.rows_of(microbatch) for microbatch in division.held[:: division.slices])
        return replace(self, value=narrow(self.value, self.dim, division.first_row, rows))


@dataclass(frozen=True, eq=False)
class PerMicrobatch(DividedValue):
    """A value for each micro-batch, made in the controller. ``dim`` is the dimension of their rows, if they have any."""

    values: tuple[Any, ...]
    dim: int | None = None

    def take(self, microbatch: int, division: "Division") -> Any:
        return self.values[microbatch - division.held.start]

    def part(self, division: "Division") -> "PerMicrobatch":
        return replace(self, values=self.values[division.held.start : division.held.stop])

    def held(self) -> Any:
        return self.values


@dataclass(frozen=True, eq=False)
class Division:
    """A mini-batch and how it is divided: plain data, which travels to the workers.

    ``arguments`` has each input of the Pipe, with a `DividedValue` in place of each value in it. ``sizes`` are the rows of
    each micro-batch, or None if nothing has rows. ``names`` has the name of the Pipe's input for each argument of the model.
    With ``mask``, every micro-batch is the whole mini-batch, with zeros in all rows that are not its own. ``share`` are the
    micro-batches that are held, if those are not all. With ``slices``, a micro-batch is a slice of sequences: so many in turn
    have the same rows.

    >>> from pippy.drivers.batch.divide import divide
    >>> division = divide({"x": torch.arange(5), "scale": 2}, chunks=2)
    >>> division.sizes, division.microbatches("x"), division.take("scale", 1)
    ((3, 2), [tensor([0, 1, 2]), tensor([3, 4])], 2)
    """

    chunks: int
    sizes: tuple[int, ...] | None
    arguments: Mapping[str, Any]
    names: Mapping[str, str]
    mask: bool = False
    starts: tuple[int, ...] = ()
    share: range | None = None
    slices: int = 1

    @property
    def rows(self) -> int | None:
        """The rows of the mini-batch; None if nothing has rows."""
        return None if self.sizes is None else sum(self.sizes) // self.slices

    @property
    def row_chunks(self) -> int:
        """Into how many micro-batches the rows are cut, each of which may be cut into slices."""
        return self.chunks // self.slices

    @property
    def is_cut(self) -> bool:
        """Whether each micro-batch has a part of the rows."""
        return self.chunks > 1 and not self.mask

    @property
    def loads(self) -> bool:
        """Whether the workers load some values."""
        return any(leaf.loaded for value in self.arguments.values() for leaf in divided_leaves(value))

    def take(self, name: str, microbatch: int) -> Any:
        """The value of an input for one micro-batch. Tensors are views of the whole; do not write into them."""
        return map_divided(lambda leaf: leaf.take(microbatch, self), self.arguments[name])

    def microbatches(self, name: str) -> list[Any]:
        """The value of an input for every micro-batch that is held."""
        return [self.take(name, microbatch) for microbatch in self.held]

    @property
    def held(self) -> range:
        """The micro-batches that are held."""
        return range(self.chunks) if self.share is None else self.share

    @property
    def first_row(self) -> int:
        """The first row that is held."""
        return self.starts[self.held.start] if self.share is not None and self.starts else 0

    def whole(self, name: str) -> list[torch.Tensor]:
        """The tensors of an input as they are held, before they are cut.

        >>> from pippy.drivers.batch.divide import divide
        >>> divide({"x": torch.arange(5)}, chunks=2).whole("x")
        [tensor([0, 1, 2, 3, 4])]
        """
        found: list[torch.Tensor] = []
        map_divided(lambda leaf: found.extend(tensors(leaf.held())), self.arguments[name])
        return found

    def only(self, names: Sequence[str]) -> "Division":
        """The same with these inputs only: those that one worker needs."""
        return replace(self, arguments={name: self.arguments[name] for name in names})

    def part(self, share: range) -> "Division":
        """The same with these micro-batches only, which keep their numbers.

        >>> from pippy.drivers.batch.divide import divide
        >>> part = divide({"x": torch.arange(5)}, chunks=3).part(range(1, 3))
        >>> part.whole("x"), part.microbatches("x"), part.take("x", 2)
        ([tensor([2, 3, 4])], [tensor([2, 3]), tensor([4])], tensor([4]))
        """
        held = replace(self, share=share)
        return replace(
            held,
            arguments={name: map_divided(lambda leaf: leaf.part(held), each) for name, each in self.arguments.items()},
        )

    def uncut(self) -> "Division":
        """The mini-batch as one micro-batch."""
        sizes = None if self.sizes is None else (self.rows or 0,)
        starts = () if sizes is None else (0,)
        return replace(self, chunks=1, sizes=sizes, starts=starts, slices=1, mask=False, share=None)

    def between(self, first: int, end: int) -> "Division":
        """A division of the micro-batches from ``first`` to before ``end`` alone, which are numbered from 0.

        >>> from pippy.drivers.batch.divide import divide
        >>> between = divide({"x": torch.arange(5)}, chunks=3).between(1, 3)
        >>> between.chunks, between.rows, between.microbatches("x")
        (2, 3, [tensor([2, 3]), tensor([4])])
        """
        held = self.part(range(first, end))
        starts = tuple(start - self.starts[first] for start in self.starts[first:end])
        sizes = self.sizes and self.sizes[first:end]
        return replace(held, chunks=end - first, sizes=sizes, starts=starts, share=None)

    def rows_of(self, microbatch: int) -> int:
        """How many rows a micro-batch has. Something must have rows."""
        assert self.sizes is not None
        return self.sizes[microbatch]

    def rows_shown(self, microbatch: int, before: int = 0, rows: int | None = None) -> str:
        """The rows of a micro-batch as the user knows them, for errors; empty if it has all of them.

        Where this is a part of a mini-batch with so many ``rows``, it has so many ``before`` it.

        >>> from pippy.drivers.batch.divide import divide
        >>> divide({"x": torch.arange(5)}, chunks=2).rows_shown(1)
        'rows 3 to 4 of 5'
        """
        if self.sizes is None or self.mask or (self.chunks == 1 and rows is None):
            return ""
        first, size = (
            before + sum(self.sizes[: microbatch - microbatch % self.slices]) // self.slices,
            self.sizes[microbatch],
        )
        shown = f"row {first}" if size == 1 else f"rows {first} to {first + size - 1}"
        of_slices = f", slice {microbatch % self.slices} of {self.slices}" * (self.slices > 1)
        return f"{shown} of {rows or self.rows}{of_slices}"

    def has_rows_in_front(self) -> bool:
        """Whether each tensor of the arguments is cut along its first dimension, so that all rows are rows of the batch."""
        held = [leaf for value in self.arguments.values() for leaf in leaves(value)]
        cut = [leaf for leaf in held if isinstance(leaf, CutTensor)]
        others = [leaf for leaf in held if not isinstance(leaf, CutTensor)]
        return all(each.dim == 0 for each in cut) and not any(
            tensor.dim() for each in others if isinstance(each, DividedValue) for tensor in tensors(each.held())
        )

    def own_rows(self, value: Any, microbatch: int, dim: int = 0) -> Any:
        """A micro-batch's own rows of what was computed with ``mask``; without, ``value`` as it is.

        >>> from pippy.drivers.batch.divide import divide
        >>> division = divide({"x": torch.arange(1, 5)}, chunks=2, mask=True)
        >>> division.take("x", 1), division.own_rows(division.take("x", 1), 1)
        (tensor([0, 0, 3, 4]), tensor([3, 4]))
        """
        if not self.mask or self.sizes is None:
            return value
        start, size, rows = self.starts[microbatch], self.sizes[microbatch], sum(self.sizes)
        return map_tensors(
            lambda each: narrow(each, dim, start, size) if each.dim() > dim and each.shape[dim] == rows else each, value
        )


def even_sizes(rows: int, chunks: int) -> tuple[int, ...]:
    """The rows of each micro-batch, the larger ones first, as in ``torch.tensor_split``.

    >>> even_sizes(7, 3)
    (3, 2, 2)
    """
    return tuple(rows // chunks + (index < rows % chunks) for index in range(chunks))


def for_each_slice(numbers: Sequence[int], slices: int) -> tuple[int, ...]:
    """The numbers of rows, for each of their slices.

    >>> for_each_slice((3, 2), slices=2)
    (3, 3, 2, 2)
    """
    return tuple(number for number in numbers for _ in range(slices))


def map_divided(function: Callable[[DividedValue], Any], tree: Any) -> Any:
    """An argument, with ``function(value)`` in place of each `DividedValue` in it."""
    if isinstance(tree, DividedValue):
        return function(tree)
    return with_children(tree, [map_divided(function, item) for item in children(tree) or ()])


def divided_leaves(tree: Any) -> list[DividedValue]:
    """Each `DividedValue` in an argument, in the order of `map_divided`."""
    if isinstance(tree, DividedValue):
        return [tree]
    return [leaf for item in children(tree) or () for leaf in divided_leaves(item)]
