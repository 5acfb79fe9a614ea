"""Dividing values into micro-batches: which are cut, along which dimension, and into how many rows each."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.columns import Column, ColumnPieces, DivisionOfColumns, LoadedColumn
from pippy.drivers.batch.division import CutTensor, DividedValue, Division, PerMicrobatch, SameForAll
from pippy.drivers.batch.rows_apart import advice_for_rows
from pippy.drivers.batch.specs import (
    ChunkSpec,
    MicroBatches,
    Replicate,
    TensorChunkSpec,
    as_spec,
    is_spec,
    items_with_paths,
    specs_of_items,
    unsuitable_spec,
)
from pippy.ir.base.brief import brief
from pippy.ir.base.checked import check_count
from pippy.ir.base.readable import count_with_noun
from pippy.ir.base.sparse_tensors import has_rows
from pippy.ir.base.trees import describe, leaves, map_tensors, tensors, with_children


def divide(
    values: Mapping[str, Any],
    chunks: int,
    chunk_spec: Mapping[str, Any] | None = None,
    *,
    mask: bool = False,
    names: Mapping[str, str] | None = None,
) -> Division:
    """Divide values into ``chunks`` micro-batches whose rows differ by at most one.

    A value without a spec is cut along dimension 0 if it is a tensor that has one; other values are the same for all.
    What is cut must have as many rows everywhere, and at least one for each micro-batch.

    >>> values = {"x": torch.zeros(4, 3), "mask": torch.zeros(3, 3)}
    >>> divide(values, 2, {"mask": Replicate()}).sizes
    (2, 2)
    >>> divide(values, 2)
    Traceback (most recent call last):
    ...
    pippy.drivers.base.errors.MicrobatchError: what is cut into 2 micro-batches has different numbers of rows:
      x: 4 rows, dimension 0 of float32[4, 3]
      mask: 3 rows, dimension 0 of float32[3, 3]
    If every micro-batch needs all of 'mask', not a part of it for its rows: chunk_spec={'mask': Replicate()}
    If it says which rows belong together, as the edges of a graph do, rows cannot be cut apart: run one micro-batch, chunks=1
    """
    check_count("chunks", chunks, "the number of micro-batches", MicrobatchError)
    specs, names = chunk_spec or {}, names or {name: name for name in values}
    unknown = [name for name in specs if name not in values]
    if unknown:
        raise MicrobatchError(f"chunk_spec names {unknown}, which are not inputs; the inputs are {list(values)}")
    users = {name: user for user, name in names.items()}
    divider = Divider(chunks, mask)
    arguments = {name: divider.divide(value, specs.get(name), users.get(name, name)) for name, value in values.items()}
    sizes = divider.sizes({users.get(name, name): value for name, value in values.items()})
    starts = tuple(accumulate(sizes[:-1], initial=0)) if sizes is not None else ()
    kind = DivisionOfColumns if divider.columns else Division
    return kind(chunks, sizes, arguments, names, mask, starts)


class Divider:
    """Divides one value after the other, and keeps the rows of each, to check that all have as many."""

    def __init__(self, chunks: int, mask: bool = False) -> None:
        self.chunks, self.mask = chunks, mask
        self.rows: list[tuple[str, str, int]] = []  # where, what, how many
        self.tensors: dict[str, torch.Tensor] = {}  # that are cut, by where they are
        self.given_sizes: list[tuple[str, tuple[int, ...]]] = []
        self.columns: list[Column] = []  # that workers load

    def divide(self, value: Any, spec: Any, path: str, outer: bool = True) -> Any:
        """A value, with a `DividedValue` for each value in it. ``outer``: the spec is for this value, not a container of it."""
        spec = as_spec(spec)
        if isinstance(value, Column):
            return self.loaded(value, spec, path, outer)
        if isinstance(value, MicroBatches):
            return self.given(value, spec, path)
        if isinstance(spec, ChunkSpec):
            return self.custom(value, spec, path)
        held = items_with_paths(value, path)
        if held is not None:
            specs, is_of_all = specs_of_items(spec, value, path), is_spec(spec)
            divided = [
                self.divide(item, item_spec, where, not is_of_all) for (where, item), item_spec in zip(held, specs)
            ]
            return with_children(value, divided) if held else SameForAll(value)
        if isinstance(spec, Replicate):
            return same_for_all(value)
        if spec is not None and not isinstance(spec, TensorChunkSpec):
            raise unsuitable_spec(spec, path, value)
        return self.cut(value, spec if spec is None or _can_have_rows(value) or outer else None, path)

    def cut(self, value: Any, spec: TensorChunkSpec | None, path: str) -> DividedValue:
        if spec is None and not _can_have_rows(value):
            return same_for_all(value)
        dim = 0 if spec is None else spec.dim
        if not isinstance(value, torch.Tensor) or not -value.dim() <= dim < value.dim():
            raise MicrobatchError(
                f"{path} cannot be cut along dimension {dim}: it is {describe(value)}, which does not have that "
                "dimension"
            )
        if self.chunks > 1 and not (has_rows(value) and (value.layout is torch.strided or not self.mask)):
            raise MicrobatchError(
                f"{path} is {describe(value)}, and a tensor of this layout cannot be "
                f"cut{' for a mask' if self.mask else ''}. If it is not part of the batch, give it a Replicate(); "
                "otherwise cut it yourself: MicroBatches([...])"
            )
        dim %= value.dim()
        self.tensors[path] = value
        self.rows.append((path, f"dimension {dim} of {describe(value)}", value.shape[dim]))
        return CutTensor(_plain(value), dim, value.requires_grad)

    def loaded(self, value: Column, spec: Any, path: str, outer: bool) -> LoadedColumn:
        """A value that a worker divides: here it is known how many rows it will have."""
        self.columns.append(value)
        if isinstance(value, ColumnPieces):
            self._check_uncut(spec, path)
            self.given_sizes.append((path, value.sizes))
            return LoadedColumn(value.key, tuple(each.batch for each in value.columns), value.counts, spec, path, outer)
        if not isinstance(spec, (Replicate, ChunkSpec)):
            self.rows.append((path, f"as many as it has indices in {value!r}", len(value)))
        return LoadedColumn(value.key, (value.batch,), (), spec, path, outer)

    def _check_uncut(self, spec: Any, path: str) -> None:
        if isinstance(spec, (TensorChunkSpec, ChunkSpec)):
            raise MicrobatchError(
                f"{path} is cut already, so the spec {brief(spec)} cannot be used; give the dimension with "
                "MicroBatches(values, dim=...)"
            )

    def given(self, value: MicroBatches, spec: Any, path: str) -> PerMicrobatch:
        self._check_uncut(spec, path)
        self._check_pieces(value.values, path, "MicroBatches has")
        if any(isinstance(leaf, Column) for leaf in leaves(value.values)):
            raise MicrobatchError(
                f"{path} is a MicroBatches of columns, but workers load and cut columns themselves; give one column "
                "with all indices"
            )
        sizes = [
            {each.shape[value.dim] for each in tensors(piece) if value.dim is not None and _has_dim(each, value.dim)}
            for piece in value.values
        ]
        if any(len(rows) > 1 for rows in sizes):
            raise MicrobatchError(
                f"the tensors in one micro-batch of {path} have different numbers of rows along dimension "
                f"{value.dim}: {[sorted(rows) for rows in sizes]}; if this dimension does not hold rows, write "
                "MicroBatches(values, dim=None)"
            )
        if all(sizes):
            self.given_sizes.append((path, tuple(rows.pop() for rows in sizes)))
        return PerMicrobatch(tuple(map_tensors(_plain_with_grad, piece) for piece in value.values), value.dim)

    def custom(self, value: Any, spec: ChunkSpec, path: str) -> PerMicrobatch:
        pieces = tuple(spec.split(value, self.chunks))
        self._check_pieces(pieces, path, f"{type(spec).__name__}.split gave")
        return PerMicrobatch(tuple(map_tensors(_plain_with_grad, piece) for piece in pieces))

    def _check_pieces(self, pieces: Sequence[Any], path: str, what: str) -> None:
        if len(pieces) != self.chunks:
            raise MicrobatchError(
                f"{what} {len(pieces)} values for {path}, and there are {self.chunks} micro-batches; give one value for each "
                "micro-batch"
            )
        if self.mask:
            raise MicrobatchError(
                f"{path} is given as MicroBatches, but with a mask every micro-batch is the whole mini-batch; give "
                "the whole value"
            )

    def sizes(self, values: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The rows of each micro-batch. ``values`` are all that were divided, for the error's example."""
        if self.given_sizes:
            return self._agreed(self.given_sizes[0])
        counts = {rows for _, _, rows in self.rows}
        if self.chunks == 1:  # nothing is cut, so nothing can be cut wrong
            return (counts.pop(),) if len(counts) == 1 else None
        if not counts:
            return None
        if len(counts) > 1:
            raise MicrobatchError(self._different(values))
        rows = counts.pop()
        if rows < self.chunks:
            where, what, _ = self.rows[0]
            fewer = f"{max(rows, 1)}{' or less' * (rows > 1)}"
            raise MicrobatchError(
                f"{where} has {count_with_noun(rows, 'row')} ({what}), too few for {brief(self.chunks)} micro-batches; "
                f"use chunks={fewer}, or TensorChunkSpec(dim) if the rows are along another dimension"
            )
        return even_sizes(rows, self.chunks)

    def _agreed(self, first: tuple[str, tuple[int, ...]]) -> tuple[int, ...]:
        path, sizes = first
        others = [f"\n  {where}: {other_sizes}" for where, other_sizes in self.given_sizes if other_sizes != sizes]
        others += [f"\n  {where}: {rows} rows, {what}" for where, what, rows in self.rows if rows != sum(sizes)]
        if others:
            raise MicrobatchError(
                f"{path} comes in micro-batches of {sizes} rows, {sum(sizes)} in all; these do not "
                f"fit:{''.join(others)}\n"
                "If one of them is not part of the batch, give it a Replicate(), or MicroBatches(values, dim=None)"
            )
        return sizes

    def _different(self, values: Mapping[str, Any]) -> str:
        lines = [f"  {path}: {rows} rows, {what}" for path, what, rows in self.rows]
        advice = advice_for_rows(values, [(path, rows) for path, _, rows in self.rows], self.tensors)
        return "\n".join(
            [f"what is cut into {self.chunks} micro-batches has different numbers of rows:", *lines, advice]
        )


def even_sizes(rows: int, chunks: int) -> tuple[int, ...]:
    """The rows of each micro-batch, the larger ones first, as in ``torch.tensor_split``.

    >>> even_sizes(7, 3)
    (3, 2, 2)
    """
    return tuple(rows // chunks + (index < rows % chunks) for index in range(chunks))


def same_for_all(value: Any) -> SameForAll:
    """A value that is the same for every micro-batch, as it is sent."""
    if isinstance(value, torch.Tensor):
        return SameForAll(_plain(value), value.requires_grad)
    return SameForAll(value)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it is sent: contiguous and on the CPU, so that what is cut from it has the same strides on all workers."""
    tensor = tensor.detach()
    tensor = tensor if tensor.is_meta else tensor.cpu()  # a driver's memory() takes tensors without numbers
    return tensor.contiguous() if tensor.layout == torch.strided else tensor


def _plain_with_grad(tensor: torch.Tensor) -> torch.Tensor:
    return _plain(tensor).requires_grad_() if tensor.requires_grad else _plain(tensor)


def _can_have_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _has_dim(tensor: torch.Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()
