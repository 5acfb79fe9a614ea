"""What a stage took for one micro-batch, and the same with one row more."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from pippy.drivers.batch.division import CutTensor, DividedValue, Division, PerMicrobatch
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
