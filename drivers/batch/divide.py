"""Dividing values into micro-batches: which are cut, along which dimension, and into how many rows each."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch

from pippy.drivers.base.errors import MicrobatchError, StepError
from pippy.drivers.batch.columns import Column, LoadedColumn
from pippy.drivers.batch.division import CutTensor, DividedValue, Division, PerMicrobatch, SameForAll, even_sizes
from pippy.drivers.batch.specs import (
    ChunkSpec,
    MicroBatches,
    Replicate,
    TensorChunkSpec,
    as_spec,
    can_have_rows,
    is_spec,
    items_with_paths,
    spec_of_parts,
    specs_of_items,
    unsuitable_spec,
)
from pippy.ir.base.public_calls import check_count
from pippy.ir.base.readable import brief, count_with_noun, listed, some
from pippy.ir.base.trees import describe, has_rows, leaves, map_tensors, tensors, with_children


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
    return Division(chunks, sizes, arguments, names, mask, starts)


class Divider:
    """Divides one value after the other, and keeps the rows of each, to check that all have as many."""

    def __init__(self, chunks: int, mask: bool = False) -> None:
        self.chunks, self.mask = chunks, mask
        self.rows: list[tuple[str, str, int]] = []  # where, what, how many
        self.tensors: dict[str, torch.Tensor] = {}  # that are cut, by where they are
        self.given_sizes: list[tuple[str, tuple[int, ...]]] = []

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
        return self.cut(value, spec if spec is None or can_have_rows(value) or outer else None, path)

    def cut(self, value: Any, spec: TensorChunkSpec | None, path: str) -> DividedValue:
        if spec is None and not can_have_rows(value):
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
        if value.counts:
            self._check_uncut(spec, path)
            self.given_sizes.append((path, value.sizes))
        elif not isinstance(spec, (Replicate, ChunkSpec)):
            self.rows.append((path, f"as many as it has indices in {value!r}", len(value)))
        return LoadedColumn(value.key, value.batches, value.counts, spec, path, outer)

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


def _has_dim(tensor: torch.Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


# What to do where a mini-batch cannot be cut: its values have different numbers of rows, or forward fails for some of them.


_ONE = "run one micro-batch, chunks=1"


def advice_for_rows(values: Mapping[str, Any], cut: Sequence[tuple[str, int]], held: Mapping[str, torch.Tensor]) -> str:
    """What to do where some ``values`` have other numbers of rows. ``cut`` has the places of what is cut, with its rows.

    ``held`` are the tensors at these places. The rows of the mini-batch are those of most arguments.

    >>> x, mask = torch.zeros(4, 3), torch.zeros(3, 4)
    >>> print(advice_for_rows({"x": x, "mask": mask}, [("x", 4), ("mask", 3)], {"x": x, "mask": mask}))
    If the rows of 'mask' are along dimension 1: chunk_spec={'mask': TensorChunkSpec(1)}
    If every micro-batch needs all of 'mask', not a part of it for its rows: chunk_spec={'mask': Replicate()}
    If it says which rows belong together, as the edges of a graph do, rows cannot be cut apart: run one micro-batch, chunks=1
    """
    votes = [rows for _, rows in dict.fromkeys((_argument(path, values), rows) for path, rows in cut)]
    usual = max(votes, key=votes.count)  # the first of several
    odd = [path for path, rows in cut if rows != usual]
    flat = [path for path in odd if any(_tells_rows(each, held.get(path)) for each in held.values())]
    lists = [name for name, value in values.items() if _has_rows_as_items(name, value, usual, odd)]
    if flat:
        return (
            f"{flat[0]!r} holds all rows in one dimension, and another value says where each begins, or how long it is, so it "
            "cannot be cut. Give a tensor of two dimensions, padded (nn.EmbeddingBag then takes padding_idx and no offsets); "
            f"or {_ONE}"
        )
    if lists:
        name = lists[0]
        return (
            f"{name!r} is a list with a value for each row, and a micro-batch would be given a part of each value. Cut the "
            f"list yourself, into pieces of one length, MicroBatches([{name}[:n], {name}[n:]], dim=None), of a Pipe whose "
            f"example has one piece; or {_ONE}"
        )
    return "\n".join(_conditions(values, odd, {path: _dims_of(held.get(path), usual) for path in odd}))


def _conditions(values: Mapping[str, Any], odd: Sequence[str], dims: Mapping[str, Sequence[int]]) -> Iterator[str]:
    named = listed(some(map(repr, odd)))
    turned = {path: f"TensorChunkSpec({found[0]})" for path, found in dims.items() if len(found) == 1}
    if len(turned) == len(odd):
        along = " and ".join(sorted({str(found[0]) for found in dims.values()}))
        yield f"If the rows of {named} are along dimension {along}: {_written(values, turned)}"
    replicated = _written(values, dict.fromkeys(odd, "Replicate()"))
    yield f"If every micro-batch needs all of {named}, not a part of it for its rows: {replicated}"
    yield f"If it says which rows belong together, as the edges of a graph do, rows cannot be cut apart: {_ONE}"


def _written(values: Mapping[str, Any], specs: Mapping[str, str]) -> str:
    """The specs of some places, as they are given to a driver."""

    def written(value: Any, path: str) -> str:
        return specs.get(path) or spec_of_parts(value, path, written)

    texts = {name: written(value, name) for name, value in values.items()}
    return f"chunk_spec={{{', '.join(f'{name!r}: {text}' for name, text in texts.items() if text != 'None')}}}"


def _argument(path: str, values: Mapping[str, Any]) -> str:
    """The argument that a place is in."""
    return next((name for name in values if path == name or path.startswith((f"{name}[", f"{name}."))), path)


def _dims_of(tensor: torch.Tensor | None, rows: int) -> list[int]:
    return [] if tensor is None else [dim for dim, size in enumerate(tensor.shape) if size == rows]


def _tells_rows(value: torch.Tensor, flat: torch.Tensor | None) -> bool:
    """Whether a value says where each row of ``flat`` begins, as nn.EmbeddingBag takes it, or how long it is, as F.ctc_loss."""
    if flat is None or flat is value or any(each.dim() != 1 or each.is_floating_point() for each in (value, flat)):
        return False
    if not len(value) or value.dtype == torch.bool or value.is_meta or bool((value < 0).any()):
        return False
    begins = bool(value[0] == 0 and (value.diff() >= 0).all() and value[-1] <= len(flat))
    return begins or int(value.sum()) == len(flat)


def _has_rows_as_items(name: str, value: Any, rows: int, odd: Sequence[str]) -> bool:
    items = items_with_paths(value, name) if isinstance(value, (list, tuple)) else None
    return items is not None and len(items) == rows and {path for path, _ in items} <= set(odd)


@contextmanager
def advising(division: Division) -> Iterator[None]:
    """A context in which the error of a step says what the micro-batch was given for which forward has failed."""
    try:
        yield
    except StepError as error:
        failure = error.failure
        if failure is not None and failure.instruction.startswith("F") and failure.microbatch is not None:
            advice = advice_for_failure(division, failure.microbatch)
            if advice not in str(error) and "What to do" not in failure.message:
                error.args = (f"{error}\n\n{advice}",)
        raise


def advice_for_failure(division: Division, microbatch: int) -> str:
    """What a micro-batch was given, and what to do if forward fails for it; empty if it is the whole mini-batch.

    >>> from pippy.drivers.batch.divide import divide
    >>> print(advice_for_failure(divide({"x": torch.zeros(4, 4), "scale": 2}, chunks=2), 0))
    Micro-batch 0 was given rows 0 to 1 of 4: 'x' along dimension 0
    If the rows of 'x' are along dimension 1, which is as long: chunk_spec={'x': TensorChunkSpec(1)}
    If the whole mini-batch runs, rows cannot be cut apart: run one micro-batch, chunks=1
    """
    rows = division.rows_shown(microbatch)
    if not rows or division.rows is None:
        return ""
    places = [each for user, name in division.names.items() for each in _leaves(division.arguments.get(name), user)]
    cut = {path: leaf for path, leaf in places if isinstance(leaf, CutTensor)}
    given = [f"{path!r} along dimension {leaf.dim}" for path, leaf in cut.items()]
    given += [
        f"all of {path!r}"
        for path, leaf in places
        if isinstance(leaf, SameForAll) and any(each.dim() for each in tensors(leaf.value))
    ]
    lines = [f"Micro-batch {microbatch} was given {rows}: {listed(given)}"]
    for path, leaf in cut.items():
        others = [dim for dim in _dims_of(leaf.value, division.rows) if dim]
        if leaf.dim == 0 and others and path in division.names:
            spec = f"chunk_spec={{{path!r}: TensorChunkSpec({others[0]})}}"
            lines.append(f"If the rows of {path!r} are along dimension {others[0]}, which is as long: {spec}")
    return "\n".join([*lines, f"If the whole mini-batch runs, rows cannot be cut apart: {_ONE}"])


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, DividedValue]]:
    if isinstance(tree, DividedValue):
        yield path, tree
    else:
        for where, item in items_with_paths(tree, path) or []:
            yield from _leaves(item, where)
