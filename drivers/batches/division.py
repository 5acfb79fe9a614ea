"""Dividing a mini-batch into micro-batches.

    x: [8, 4], mask: [4, 4], scale: 2     divide, 3 chunks      Cut([8, 4], dim 0) · Whole([4, 4]) · Whole(2), sizes 3 3 2
    one value for each input           ─────────────────────▶   the plan: whole values, and how to cut them
                                           take, by a worker    x[0:3], mask, 2 · x[3:6], mask, 2 · x[6:8], mask, 2

A plan travels, not the pieces: the controller's work and its messages do not grow with the number of micro-batches. Only
what a spec of the user's cuts, and what was given cut, travels in pieces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from pippy.drivers.batches.specs import (
    ChunkSpec,
    MicroBatches,
    Replicate,
    TensorChunkSpec,
    is_spec,
    normal,
    parts,
    refuse,
    specs_inside,
)
from pippy.drivers.errors import MicrobatchError
from pippy.ir.compiled import Compiled
from pippy.ir.signature import bind, signature_of
from pippy.ir.trees import children, describe, map_tensors, tensors, with_children


@dataclass(frozen=True, eq=False)
class Leaf:
    """A part of an argument, and how it is divided."""

    def take(self, microbatch: int, division: "Division") -> Any:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Whole(Leaf):
    """The same object for every micro-batch."""

    value: Any
    requires_grad: bool = False  # of what was given: a value that travels must not drag a graph along

    def take(self, microbatch: int, division: "Division") -> Any:
        return self.value.detach().requires_grad_() if self.requires_grad else self.value


@dataclass(frozen=True, eq=False)
class Cut(Leaf):
    """A view of its rows for each micro-batch."""

    value: torch.Tensor
    dim: int
    requires_grad: bool = False

    def take(self, microbatch: int, division: "Division") -> torch.Tensor:
        if division.chunks == 1:
            return self.value.detach().requires_grad_(self.requires_grad)
        start, size = division.starts[microbatch], division.rows_of(microbatch)
        piece = self.value.narrow(self.dim, start, size)
        if division.mask:
            masked = torch.zeros_like(self.value)
            masked.narrow(self.dim, start, size).copy_(piece)
            piece = masked
        return piece.requires_grad_() if self.requires_grad else piece


@dataclass(frozen=True, eq=False)
class Pieces(Leaf):
    """A value for each micro-batch, made in the controller. ``dim`` is where they have rows."""

    values: tuple[Any, ...]
    dim: int | None = None

    def take(self, microbatch: int, division: "Division") -> Any:
        return self.values[microbatch]


@dataclass(frozen=True, eq=False)
class Division:
    """A mini-batch and how it is divided: plain data, which travels to the workers.

    ``arguments`` has for each input of the Pipe a tree of leaves. ``sizes`` are the rows of each micro-batch, or None if
    nothing has rows. ``names`` leads from the names of the model's arguments to those of the Pipe's inputs. With ``mask``,
    every micro-batch is the whole mini-batch, with zeros in all rows that are not its own.

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

    def take(self, name: str, microbatch: int) -> Any:
        """The value of an input for one micro-batch. Tensors are views of the whole; do not write into them."""
        return _map_plan(lambda leaf: leaf.take(microbatch, self), self.arguments[name])

    def microbatches(self, name: str) -> list[Any]:
        """The value of an input for every micro-batch."""
        return [self.take(name, microbatch) for microbatch in range(self.chunks)]

    def only(self, names: Sequence[str]) -> "Division":
        """The part of it that holds just these inputs: what one worker needs."""
        return replace(self, arguments={name: self.arguments[name] for name in names})

    def rows_of(self, microbatch: int) -> int:
        """How many rows a micro-batch has. To be asked where something has rows only."""
        assert self.sizes is not None
        return self.sizes[microbatch]

    def own_rows(self, value: Any, microbatch: int, dim: int = 0) -> Any:
        """Under ``mask``, a micro-batch's own rows of what was computed; else ``value`` as it is.

        >>> division = divide({"x": torch.arange(1, 5)}, chunks=2, mask=True)
        >>> division.take("x", 1), division.own_rows(division.take("x", 1), 1)
        (tensor([0, 0, 3, 4]), tensor([3, 4]))
        """
        if not self.mask or self.sizes is None:
            return value
        start, size, rows = self.starts[microbatch], self.sizes[microbatch], sum(self.sizes)
        return map_tensors(
            lambda each: each.narrow(dim, start, size) if each.dim() > dim and each.shape[dim] == rows else each, value
        )


def divide_call(
    compiled: Compiled,
    chunks: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    specs: Sequence[Any] | Mapping[str, Any] | None = None,
    batch_dims: Sequence[int | None] | Mapping[str, int | None] | None = None,
    mask: bool = False,
) -> Division:
    """Divide the arguments of a call of the Pipe. ``specs`` and ``batch_dims`` are given by name, or in order as ``args``.

    >>> from torch import nn
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), nn.MSELoss())
    >>> division = divide_call(pipe, 2, (torch.ones(3, 5), torch.ones(5, 2)), {}, batch_dims=[1])
    >>> division.sizes, division.take("target", 1).shape, division.take("input_1", 1).shape
    ((3, 2), torch.Size([2, 2]), torch.Size([3, 2]))
    """
    values = bind(compiled, args, kwargs)
    users = {node.name: str(node.target).lstrip("*") for node in compiled.split_gm.graph.find_nodes(op="placeholder")}
    found = _specs_of_call(compiled, args, kwargs, specs, "specs")
    for name, dim in _specs_of_call(compiled, args, kwargs, _without_zero(batch_dims), "batch_dims").items():
        found[name] = _either(name, found.get(name), dim)
    by_input = {name: found[user] for name, user in users.items() if user in found}
    return divide(values, chunks, by_input, mask=mask, names={user: name for name, user in users.items()})


def _without_zero(dims: Sequence[int | None] | Mapping[str, int | None] | None) -> Any:
    """0 is what is done anyhow, and PiPPy's users write it for values that have no rows, too."""
    if isinstance(dims, Mapping):
        return {name: dim or None for name, dim in dims.items()}
    return None if dims is None else [dim or None for dim in dims]


def _either(name: str, spec: Any, dim: Any) -> Any:
    if isinstance(dim, dict):  # of **kwargs
        spec = spec or {}
        return {key: _either(f"{name}[{key!r}]", spec.get(key), dim.get(key)) for key in {**spec, **dim}}
    if isinstance(dim, tuple):  # of *args
        spec = spec if isinstance(spec, tuple) else (spec,) * len(dim)
        longest = max(len(spec), len(dim))
        padded = [(*each, *(None,) * (longest - len(each))) for each in (spec, dim)]
        return tuple(_either(f"{name}[{index}]", *both) for index, both in enumerate(zip(*padded)))
    if spec is not None and dim is not None:
        raise MicrobatchError(f"{name} has a spec, {spec!r}, and a batch dim, {dim!r}; give one of them")
    return dim if spec is None else spec


def _specs_of_call(
    compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any], specs: Any, what: str
) -> dict[str, Any]:
    """Specs by the names of the model's arguments: bound as the arguments are."""
    if specs is None:
        return {}
    if isinstance(specs, Mapping):
        return _by_name(compiled, specs, what)
    if not isinstance(specs, (list, tuple)) or len(specs) > len(args):
        raise MicrobatchError(
            f"{what} is {specs!r}, and the call has {len(args)} positional arguments; give one for each, in order, or a dict "
            "by name"
        )
    given, found = [*specs, *[None] * (len(args) - len(specs))], {}
    if compiled.target_name is not None and compiled.target_name not in kwargs:
        found[compiled.target_name] = given.pop()
    found.update(signature_of(compiled).bind_partial(*given).arguments)
    return {name: spec for name, spec in found.items() if spec is not None}


def _by_name(compiled: Compiled, specs: Mapping[str, Any], what: str) -> dict[str, Any]:
    """What ``**kwargs`` takes may be named as in the call."""
    parameters = signature_of(compiled).parameters
    rest = next((name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD), None)
    known = [*parameters, *([compiled.target_name] if compiled.target_name else [])]
    found = {name: spec for name, spec in specs.items() if name in known and spec is not None}
    unknown = {name: spec for name, spec in specs.items() if name not in known and spec is not None}
    if unknown and rest is None:
        raise MicrobatchError(f"{what} names {list(unknown)}, which are no inputs; the inputs are {', '.join(known)}")
    if unknown and rest is not None:
        found[rest] = {**found.get(rest, {}), **unknown}
    return found


def divide(
    values: Mapping[str, Any],
    chunks: int,
    specs: Mapping[str, Any] | None = None,
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
    pippy.drivers.errors.MicrobatchError: what is cut into 2 micro-batches has different numbers of rows:
      x: 4 rows, dimension 0 of float32[4, 3]
      mask: 3 rows, dimension 0 of float32[3, 3]
    Give what is no part of the batch a Replicate(), and what has its rows elsewhere a TensorChunkSpec(dim), for example specs={'mask': Replicate()}
    """  # noqa: E501
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise MicrobatchError(f"chunks is {chunks!r}; it is the number of micro-batches, 1 or more")
    specs, names = specs or {}, names or {name: name for name in values}
    unknown = [name for name in specs if name not in values]
    if unknown:
        raise MicrobatchError(f"specs names {unknown}, which are no inputs; the inputs are {list(values)}")
    users = {name: user for user, name in names.items()}
    planner = Planner(chunks, mask)
    arguments = {name: planner.plan(value, specs.get(name), users.get(name, name)) for name, value in values.items()}
    sizes = planner.sizes()
    starts = tuple(accumulate(sizes[:-1], initial=0)) if sizes is not None else ()
    return Division(chunks, sizes, arguments, names, mask, starts)


class Planner:
    """Makes the plan for each value, and keeps what rows it met on the way."""

    def __init__(self, chunks: int, mask: bool = False) -> None:
        self.chunks, self.mask = chunks, mask
        self.rows: list[tuple[str, str, int]] = []  # where, what, how many
        self.given_sizes: list[tuple[str, tuple[int, ...]]] = []

    def plan(self, value: Any, spec: Any, path: str, outer: bool = True) -> Any:
        """The tree of leaves for a value. ``outer``: the spec is meant for this very value, not for a container of it."""
        spec = normal(spec)
        if isinstance(value, MicroBatches):
            return self.given(value, spec, path)
        if isinstance(spec, ChunkSpec):
            return self.custom(value, spec, path)
        held = parts(value, path)
        if held is not None:
            specs, whole = specs_inside(spec, value, path), is_spec(spec)
            planned = [self.plan(item, its, where, not whole) for (where, item), its in zip(held, specs)]
            return with_children(value, planned) if held else Whole(value)
        if isinstance(spec, Replicate):
            return whole_leaf(value)
        if spec is not None and not isinstance(spec, TensorChunkSpec):
            raise refuse(spec, path, value)
        return self.cut(value, spec if spec is None or _can_have_rows(value) or outer else None, path)

    def cut(self, value: Any, spec: TensorChunkSpec | None, path: str) -> Leaf:
        if spec is None and not _can_have_rows(value):
            return whole_leaf(value)
        dim = 0 if spec is None else spec.dim
        if not isinstance(value, torch.Tensor) or not -value.dim() <= dim < value.dim():
            raise MicrobatchError(
                f"{path} is to be cut along dimension {dim}, and is {describe(value)}, which has none"
            )
        if value.layout != torch.strided:
            raise MicrobatchError(
                f"{path} is a tensor of layout {value.layout}, which is not cut; give it a Replicate(), or cut it yourself: "
                "MicroBatches([...])"
            )
        dim %= value.dim()
        self.rows.append((path, f"dimension {dim} of {describe(value)}", value.shape[dim]))
        return Cut(_plain(value), dim, value.requires_grad)

    def given(self, value: MicroBatches, spec: Any, path: str) -> Pieces:
        if isinstance(spec, (TensorChunkSpec, ChunkSpec)):
            raise MicrobatchError(
                f"{path} is cut already, and has the spec {spec!r}; say MicroBatches(values, dim=...)"
            )
        self._check_pieces(value.values, path, "MicroBatches has")
        sizes = [
            {each.shape[value.dim] for each in tensors(piece) if value.dim is not None and _has_dim(each, value.dim)}
            for piece in value.values
        ]
        if any(len(rows) > 1 for rows in sizes):
            raise MicrobatchError(
                f"the tensors in one micro-batch of {path} have different numbers of rows along dimension {value.dim}: "
                f"{[sorted(rows) for rows in sizes]}; if they are no rows, say MicroBatches(values, dim=None)"
            )
        if all(sizes):
            self.given_sizes.append((path, tuple(rows.pop() for rows in sizes)))
        return Pieces(tuple(map_tensors(_plain_with_grad, piece) for piece in value.values), value.dim)

    def custom(self, value: Any, spec: ChunkSpec, path: str) -> Pieces:
        pieces = tuple(spec.split(value, self.chunks))
        self._check_pieces(pieces, path, f"{type(spec).__name__}.split gave")
        return Pieces(tuple(map_tensors(_plain_with_grad, piece) for piece in pieces))

    def _check_pieces(self, pieces: Sequence[Any], path: str, what: str) -> None:
        if len(pieces) != self.chunks:
            raise MicrobatchError(f"{what} {len(pieces)} values for {path}, and there are {self.chunks} micro-batches")
        if self.mask:
            raise MicrobatchError(
                f"{path} comes in pieces, and with a mask every micro-batch is the whole mini-batch; give it whole"
            )

    def sizes(self) -> tuple[int, ...] | None:
        """The rows of each micro-batch."""
        if self.given_sizes:
            return self._agreed(self.given_sizes[0])
        counts = {rows for _, _, rows in self.rows}
        if self.chunks == 1:  # nothing is cut, so nothing can be cut wrong
            return (counts.pop(),) if len(counts) == 1 else None
        if not counts:
            return None
        if len(counts) > 1:
            raise MicrobatchError(self._different())
        rows = counts.pop()
        if rows < self.chunks:
            where, what, _ = self.rows[0]
            raise MicrobatchError(
                f"{where} has {rows} rows ({what}), too few for {self.chunks} micro-batches; "
                f"use chunks={max(rows, 1)} or less, or TensorChunkSpec(dim) if the rows are along another dimension"
            )
        return even_sizes(rows, self.chunks)

    def _agreed(self, first: tuple[str, tuple[int, ...]]) -> tuple[int, ...]:
        path, sizes = first
        others = [f"\n  {where}: {theirs}" for where, theirs in self.given_sizes if theirs != sizes]
        others += [f"\n  {where}: {rows} rows, {what}" for where, what, rows in self.rows if rows != sum(sizes)]
        if others:
            raise MicrobatchError(
                f"{path} comes in micro-batches of {sizes} rows, {sum(sizes)} in all; these do not fit:{''.join(others)}\n"
                "Give what is no part of the batch a Replicate(), or MicroBatches(values, dim=None)"
            )
        return sizes

    def _different(self) -> str:
        counts = [rows for _, _, rows in self.rows]
        usual = max(counts, key=lambda rows: (counts.count(rows), rows))
        odd = next(path for path, _, rows in self.rows if rows != usual)
        lines = [f"  {path}: {rows} rows, {what}" for path, what, rows in self.rows]
        return "\n".join(
            [
                f"what is cut into {self.chunks} micro-batches has different numbers of rows:",
                *lines,
                "Give what is no part of the batch a Replicate(), and what has its rows elsewhere a TensorChunkSpec(dim), "
                f"for example specs={{{odd!r}: Replicate()}}",
            ]
        )


def even_sizes(rows: int, chunks: int) -> tuple[int, ...]:
    """The rows of each micro-batch, the larger ones first, as in ``torch.tensor_split``.

    >>> even_sizes(7, 3)
    (3, 2, 2)
    """
    return tuple(rows // chunks + (index < rows % chunks) for index in range(chunks))


def whole_leaf(value: Any) -> Whole:
    """A value that is the same for every micro-batch, fit to travel."""
    if isinstance(value, torch.Tensor):
        return Whole(_plain(value), value.requires_grad)
    return Whole(value)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous and on the CPU, as after it has travelled: a cut has the same strides everywhere."""
    tensor = tensor.detach().cpu()
    return tensor.contiguous() if tensor.layout == torch.strided else tensor


def _plain_with_grad(tensor: torch.Tensor) -> torch.Tensor:
    return _plain(tensor).requires_grad_() if tensor.requires_grad else _plain(tensor)


def _can_have_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _has_dim(tensor: torch.Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def _map_plan(function: Callable[[Leaf], Any], plan: Any) -> Any:
    if isinstance(plan, Leaf):
        return function(plan)
    return with_children(plan, [_map_plan(function, item) for item in children(plan) or ()])
