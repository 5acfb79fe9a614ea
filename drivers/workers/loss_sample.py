"""A sample of what a loss is computed from, which can be cut into rows."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from pippy.drivers.batches.division import CutTensor, DividedValue, Division, PerMicrobatch
from pippy.ir.row_sizes import UNSURE, RowDim, at_rows, dims_of, guess_rows, is_known
from pippy.ir.sparse_tensors import cat, equal, has_rows, narrow
from pippy.ir.trees import children, leaves, map_leaves

Place = tuple[int, int]  # of a tensor: the number of the input, and of the value in it


@dataclass(frozen=True)
class Sample:
    """Inputs of the loss that can be cut: each tensor along its ``dims`` entry, or not at all (None).

    ``row_sizes`` says how each input depends on the number of rows: of a number, what it is for any number of them. Where a
    dimension has several values for each row, those of one row stand together, or with ``spread`` those of one kind.
    ``is_joined`` says that it is of several micro-batches. Tensors that are ``counted`` number their rows from 0.
    """

    inputs: tuple[Any, ...]
    dims: tuple[int | None, ...]
    rows: int
    row_sizes: tuple[Any, ...]
    spread: bool = False
    is_joined: bool = False
    counted: frozenset[Place] = frozenset()

    def given(self) -> tuple[Any, ...]:
        """The inputs, in which sizes are those of so many rows."""
        return tuple(at_rows(size, self.rows, value) for value, size in zip(self.inputs, self.row_sizes))

    def flattened(self) -> int:
        """How many tensors have several values for each row in a dimension."""
        return sum(dim is not None and leaf.shape[dim] > self.rows for _, leaf, dim in self.tensors())

    def guessed(self, numbers: Sequence[int]) -> "Sample":
        """The same with another guess for these inputs, where nothing is known: sizes in them are those of the rows."""
        sizes, dims = list(self.row_sizes), list[int | None]()
        places = iter(self.dims)
        for number, value in enumerate(self.inputs):
            its = [next(places) for _ in leaves(value)]
            if number in numbers and not is_known(sizes[number]):
                sizes[number] = guess_rows(value, self.rows)
                its = [each.dim if isinstance(each, RowDim) else None for each in dims_of(sizes[number], value)]
            dims += its
        return replace(self, dims=tuple(dims), row_sizes=tuple(sizes))

    def part(self, start: int, stop: int) -> "Sample":
        """Some rows, in tensors of their own."""

        def cut(place: Place, leaf: torch.Tensor, dim: int | None) -> torch.Tensor:
            if dim is None:
                return leaf.clone()
            each = leaf.shape[dim] // self.rows
            if place in self.counted:
                return narrow(leaf, dim, 0, (stop - start) * each).clone()
            if self.spread and each > 1:
                return leaf.unflatten(dim, (each, self.rows)).narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)
            return narrow(leaf, dim, start * each, (stop - start) * each).clone()

        return replace(self.mapped(cut), rows=stop - start)

    def longer(self) -> "Sample":
        """One row more: the last one twice, in tensors of their own."""

        def longer(place: Place, leaf: torch.Tensor, dim: int | None) -> torch.Tensor:
            if dim is None:
                return leaf.clone()
            size = leaf.shape[dim]
            each = size // self.rows
            return cat([leaf, narrow(leaf, dim, size - each, each)], dim)

        return replace(self.mapped(longer), rows=self.rows + 1)

    def joined(self, other: "Sample") -> "Sample | None":
        """The rows of both; None if what has no rows differs."""
        mine, theirs = ([leaf for value in each.inputs for leaf in leaves(value)] for each in (self, other))
        if len(mine) != len(theirs) or self.dims != other.dims or self.counted:
            return None
        found = []
        for one, two, dim in zip(mine, theirs, self.dims):
            if dim is None and isinstance(one, torch.Tensor) and not (one.shape == two.shape and equal(one, two)):
                return None
            found.append(one if dim is None else cat([one, two], dim))
        items = iter(found)
        return replace(
            self,
            inputs=tuple(map_leaves(lambda _: next(items), value) for value in self.inputs),
            rows=self.rows + other.rows,
            is_joined=True,
        )

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

    def copied(self) -> "Sample":
        """The same in tensors of their own: a loss may change what it is given."""
        return self.mapped(lambda place, leaf, dim: leaf.clone())


@dataclass(frozen=True)
class Cut:
    """A sample cut in two, and the losses of the parts and of the whole."""

    parts: tuple[tuple[Any, ...], tuple[Any, ...]]
    rows: tuple[int, int]
    losses: tuple[float, float]
    whole: float
    tolerance: float

    def fits(self, weights: tuple[float, float]) -> bool:
        """Whether the weighted losses add up. A loss of weight 0 is left out, nan or not."""
        terms = [weight * loss for weight, loss in zip(weights, self.losses) if weight]
        size = abs(self.whole) + sum(map(abs, terms))
        return math.isfinite(size) and abs(sum(terms) - self.whole) <= self.tolerance * size

    def alike(self) -> bool:
        """Whether any weights fit, as the losses are the same."""
        return all(abs(loss - self.whole) <= 1e3 * self.tolerance * abs(self.whole) for loss in self.losses)


def sample_of(
    inputs: Sequence[Any],
    names: Sequence[str],
    given: Collection[str],
    microbatch: int,
    division: Division,
    flattened: bool,
    row_sizes: Mapping[str, Any] | None = None,
) -> Sample:
    """A sample of a micro-batch. ``names`` are those of the inputs, and ``given`` those of them that the user gave.

    ``flattened`` says that a computed tensor may have several values for each row in its first dimension. ``row_sizes``
    were found for rows in the first dimension of the inputs of the Pipe.
    """
    rows = division.rows_of(microbatch)
    known = {
        name: list(_dims_given(division.arguments[name], value)) for name, value in zip(names, inputs) if name in given
    }
    likely = [*(dim for dims in known.values() for dim in dims if dim is not None), 0]
    first = all(divided.dim == 0 for value in division.arguments.values() for divided in _cut_tensors(value))
    found = row_sizes if row_sizes and first else {}
    sizes = [None if name in known else found.get(name, UNSURE) for name in names]
    dims, counted = list[int | None](), set[Place]()
    for number, (name, value, size) in enumerate(zip(names, inputs, sizes)):
        if name in known:
            dims += known[name]
            continue
        for index, (leaf, its) in enumerate(zip(leaves(value), dims_of(size, value))):
            dims.append(_dim_of(leaf, rows, likely, flattened) if its is UNSURE else its.dim if its else None)
            if isinstance(its, RowDim) and its.counted:
                counted.add((number, index))
    return Sample(tuple(inputs), tuple(dims), rows, tuple(sizes), counted=frozenset(counted))


def _cut_tensors(divided: Any) -> Iterator[CutTensor]:
    if isinstance(divided, CutTensor):
        yield divided
    elif not isinstance(divided, DividedValue):
        for item in children(divided) or ():
            yield from _cut_tensors(item)


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


def _dim_of(leaf: Any, rows: int, likely: Sequence[int], flattened: bool) -> int | None:
    """Where a computed tensor has its rows, or several values for each row."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or not has_rows(leaf):
        return None
    exact = [dim for dim in likely if dim < leaf.dim() and leaf.shape[dim] == rows]
    if exact:
        return exact[0]
    return 0 if flattened and leaf.shape[0] and leaf.shape[0] % rows == 0 else None
