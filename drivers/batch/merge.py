"""Merges the outputs of the micro-batches into what the model would have returned for the whole mini-batch.

    a tensor with the micro-batch's rows in dimension 0      concatenated
    a constant, or an input that all micro-batches share     returned once
    a text, a dtype or the like                              returned once, if all micro-batches gave the same
    anything else, numbers and other tensors                 refused: only the user knows

A spec changes that: see specs.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch

from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.specs import (
    ChunkSpec,
    Max,
    Mean,
    Min,
    Replicate,
    Sum,
    TensorChunkSpec,
    as_spec,
    can_have_rows,
    is_spec,
    items_with_paths,
    spec_of_parts,
    specs_of_items,
    unsuitable_spec,
)
from pippy.ir.base.readable import brief
from pippy.ir.base.trees import cat, children, describe, equal, leaves, narrow, with_children


def merge_outputs(
    outputs: Sequence[Any],
    sizes: tuple[int, ...] | None,
    spec: Any = None,
    *,
    mask: bool = False,
    shared: Any = False,
    row_dims: Mapping[int, int | None] | None = None,
) -> Any:
    """One output from those of the micro-batches, which have ``sizes`` rows.

    With ``mask``, each has all rows of the mini-batch, and only its own rows are used.

    ``shared`` has the shape of an output, or of the outer part of it, with True where all micro-batches have the same.
    ``row_dims`` has the dimension of the rows of tensors of the first output, by their ids, where that is known; None for
    those that have no rows, though they may have as many. All others have their rows in front.

    >>> outputs = [{"y": torch.zeros(2, 1), "best": torch.tensor(1.0)}, {"y": torch.ones(1, 1), "best": torch.tensor(4.0)}]
    >>> merge_outputs(outputs, sizes=(2, 1), spec={"best": Max()})
    {'y': tensor([[0.],
            [0.],
            [1.]]), 'best': tensor(4.)}
    >>> merge_outputs(outputs, (2, 1), {"best": Mean()})["best"]
    tensor(2.)
    """
    if sizes is not None and len(sizes) != len(outputs):
        raise MicrobatchError(f"there are {len(outputs)} outputs, and sizes of {len(sizes)} micro-batches: {sizes}")
    merge = _Merge(sizes, mask, row_dims or {})
    merged = merge.tree(list(outputs), spec, "output", shared)
    if merge.unknown:
        raise MicrobatchError(_needs_spec(merge, outputs))
    return merged


_SAYS_NOTHING = (str, bytes, type(None), torch.dtype, torch.device, torch.layout)  # of the data


class LossPlace:
    """Stands for the loss inside of what a model returns: it is put together by itself, by its weights."""


LOSS_PLACE = LossPlace()


def check_leaves_loss_alone(spec: Any, value: Any, path: str = "output") -> None:
    """Raise if a spec is for the loss, or a function or ChunkSpec for something that holds it.

    >>> check_leaves_loss_alone((None, Sum()), (LOSS_PLACE, 1))
    >>> check_leaves_loss_alone(Sum(), (LOSS_PLACE, 1))  # for all of it but the loss
    >>> check_leaves_loss_alone((Sum(), None), (LOSS_PLACE, 1))
    Traceback (most recent call last):
    pippy.drivers.base.errors.MicrobatchError: output_spec has Sum(weights=None) for output[0], but output[0] is the loss, ...
    """
    spec = as_spec(spec)
    if spec is None or not any(leaf is LOSS_PLACE for leaf in leaves(value)):
        return
    if value is LOSS_PLACE:
        raise MicrobatchError(
            f"output_spec has {brief(spec)} for {path}, but {path} is the loss, which is always merged by its "
            "weights; give None in its place, and give its reduction with loss_reduction="
        )
    if isinstance(spec, ChunkSpec) or (callable(spec) and not is_spec(spec)):
        raise MicrobatchError(
            f"output_spec has {brief(spec)} for {path}, but {path} contains the loss, which is always merged by its "
            f"weights; give a spec for each part of {path}, and None for the loss"
        )
    if not is_spec(spec):
        items = items_with_paths(value, path) or []
        for (where, item), item_spec in zip(items, specs_of_items(spec, value, path)):
            check_leaves_loss_alone(item_spec, item, where)


@dataclass(frozen=True)
class _Merge:
    sizes: tuple[int, ...] | None
    mask: bool
    row_dims: Mapping[int, int | None]
    unknown: list[str] = field(default_factory=list)  # paths of values that only the user knows how to put together
    alike: list[str] = field(default_factory=list)  # those of them that have as many rows by chance

    def tree(self, values: list[Any], spec: Any, path: str, shared: Any, outer: bool = True) -> Any:
        """Merge containers item by item. ``outer`` says that the spec is for this value, not for a container of it."""
        spec = as_spec(spec)
        if spec is not None and outer:
            check_leaves_loss_alone(spec, values[0], path)
        if values[0] is LOSS_PLACE:
            return LOSS_PLACE
        if isinstance(spec, ChunkSpec):
            return spec.merge(values)
        held = [items_with_paths(value, path) for value in values]
        if callable(spec) and not is_spec(spec):
            return spec(values)
        if held[0] is None or any(type(value) is not type(values[0]) for value in values):
            return self.leaf(values, spec, path, outer, shared is True)
        names = [[where for where, _ in each or ()] for each in held]
        if any(each != names[0] for each in names):
            raise MicrobatchError(
                f"{path} has a different structure in each micro-batch: "
                f"{_two(values, lambda a, b: len(a) == len(b))}; give a function that merges the list of values"
            )
        columns = zip(*[[item for _, item in each or ()] for each in held])
        specs, is_of_all = specs_of_items(spec, values[0], path), is_spec(spec)
        parts = _shared_parts(shared, len(specs))
        merged = [
            self.tree(list(each), item_spec, where, part, not is_of_all)
            for each, item_spec, where, part in zip(columns, specs, names[0], parts)
        ]
        return with_children(values[0], merged) if merged else values[0]

    def leaf(self, values: list[Any], spec: Any, path: str, outer: bool, shared: bool) -> Any:
        if isinstance(spec, TensorChunkSpec) and not outer and not all(can_have_rows(value) for value in values):
            spec = None
        if spec is None:
            return values[0] if shared else self.default(values, path)
        for kind, merge in _MERGES.items():
            if isinstance(spec, kind):
                return merge(self, values, spec, path)
        raise unsuitable_spec(spec, path, values[0])

    def default(self, values: list[Any], path: str) -> Any:
        if len(values) == 1:
            return values[0]
        dim = self.row_dims.get(id(values[0]), 0)
        if dim is None and self.follows(values, 0):
            self.alike.append(path)
        elif dim is not None and self.follows(values, dim):
            return self.cat(values, TensorChunkSpec(dim), path)
        if isinstance(values[0], _SAYS_NOTHING) and all(map(_same_output, values[1:], values[:-1])):
            return values[0]
        if all(isinstance(value, (torch.Tensor, torch.Size, int, float, complex)) for value in values):
            self.unknown.append(path)
            return None
        raise MicrobatchError(
            f"{path} is neither a tensor nor a number, so it cannot be merged: {_two(values)}. Give the driver an "
            "output_spec for it: Replicate() if it is the same in all micro-batches, otherwise a function that "
            "merges the list of values"
        )

    def follows(self, values: list[Any], dim: int) -> bool:
        """Whether each value has as many rows as its micro-batch."""
        if self.sizes is None or not all(can_have_rows(value) for value in values):
            return False
        rows = [sum(self.sizes)] * len(values) if self.mask else list(self.sizes)
        return [value.shape[dim] for value in values] == rows

    def cat(self, values: list[Any], spec: TensorChunkSpec, path: str) -> torch.Tensor:
        if not all(can_have_rows(value) and -value.dim() <= spec.dim < value.dim() for value in values):
            raise MicrobatchError(
                f"{path} cannot be concatenated along dimension {spec.dim}: it is {describe(values[0])}"
            )
        if self.mask and self.follows(values, spec.dim):
            assert self.sizes is not None
            starts = [sum(self.sizes[:index]) for index in range(len(values))]
            values = [narrow(value, spec.dim, *rows) for value, *rows in zip(values, starts, self.sizes)]
        try:
            return cat(values, spec.dim)
        except RuntimeError as error:
            shapes = ", ".join(map(describe, values))
            raise MicrobatchError(
                f"{path} cannot be concatenated along dimension {spec.dim}: {error}. The micro-batches returned "
                f"{shapes}; give a function of the list of values that pads them"
            ) from None

    def equal(self, values: list[Any], spec: Replicate, path: str) -> Any:
        if not all(map(_same_output, values[1:], values[:-1])):
            raise MicrobatchError(
                f"{path} has the spec Replicate(), but it differs between micro-batches: {_two(values, _same_output)}"
            )
        return values[0]

    def sum(self, values: list[Any], spec: Sum, path: str) -> Any:
        if spec.weights is None:
            return reduce(add, values)
        if len(spec.weights) != len(values):
            raise MicrobatchError(f"{path} has {len(spec.weights)} weights, for {len(values)} micro-batches")
        weighted = [value * weight for value, weight in zip(values, spec.weights) if weight]
        return reduce(add, weighted) if weighted else values[0] * 0

    def largest(self, values: list[Any], spec: Max, path: str) -> Any:
        _check_dense(values, spec, path)
        return reduce(_largest, values)

    def smallest(self, values: list[Any], spec: Min, path: str) -> Any:
        _check_dense(values, spec, path)
        return reduce(_smallest, values)

    def mean(self, values: list[Any], spec: Mean, path: str) -> Any:
        if len(values) == 1 or all(map(_same_output, values[1:], values[:-1])):
            return values[0]
        if self.sizes is None:
            raise MicrobatchError(
                f"{path} has the spec Mean(), but nothing in the mini-batch has rows to weight by; give a function "
                "that merges the list of values"
            )
        rows = sum(self.sizes)
        return self.sum(values, Sum(tuple(size / rows for size in self.sizes)), path)


def _check_dense(values: list[Any], spec: Max | Min, path: str) -> None:
    if any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in values):
        raise MicrobatchError(
            f"{path} has the spec {brief(spec)}, but it is {describe(values[0])}, and torch cannot compare tensors "
            "of this layout; give a function of the list of values, which may call to_dense()"
        )


def _largest(one: Any, other: Any) -> Any:
    return torch.maximum(one, other) if isinstance(one, torch.Tensor) else max(one, other)


def _smallest(one: Any, other: Any) -> Any:
    return torch.minimum(one, other) if isinstance(one, torch.Tensor) else min(one, other)


def _shared_parts(shared: Any, count: int) -> Sequence[Any]:
    parts = None if isinstance(shared, bool) else children(shared)
    return parts if parts is not None and len(parts) == count else [shared is True] * count


def _needs_spec(merge: _Merge, outputs: Sequence[Any]) -> str:
    """The error for outputs without rows, with a spec to give."""
    unknown, sizes = merge.unknown, merge.sizes

    def written(value: Any, path: str) -> str:
        return "Sum()" if path in unknown else spec_of_parts(value, path, written)

    rows = "" if sizes is None else f" {sizes}"
    alike = f" ({', '.join(merge.alike)}: the row count only happens to match)" if merge.alike else ""
    has_loss = any(leaf is LOSS_PLACE for leaf in leaves(outputs[0]))
    first = outputs[0]
    may_be_loss = isinstance(first, torch.Tensor) and first.dim() == 0 and first.is_floating_point()
    return (
        f"{', '.join(unknown)}: the first dimension is not the rows{rows} of the micro-batches{alike}, so pippy "
        f"does not know how to merge the outputs. Micro-batch 0 returned {describe(outputs[0])}. If each is a sum, "
        f"give the driver output_spec={written(outputs[0], 'output')}\n"
        "Other specs are Mean() over rows, Max(), Min(), Replicate() for a value that is the same in all "
        "micro-batches, TensorChunkSpec(dim) for rows in another dimension, or a function that merges the list of "
        "values"
        + "; with driver.run(..., outputs=False) the step gives the loss alone" * has_loss
        + ". If it is the loss, make the Pipe with pipeline(..., output_loss_value_spec=True)" * may_be_loss
    )


_MERGES: dict[type, Callable[..., Any]] = {
    TensorChunkSpec: _Merge.cat,
    Replicate: _Merge.equal,
    Sum: _Merge.sum,
    Mean: _Merge.mean,
    Max: _Merge.largest,
    Min: _Merge.smallest,
}


def _same_output(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        if one.layout is not torch.strided or other.layout is not torch.strided:
            return equal(one, other)
        return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # values that cannot be compared count as different
        return False


def _two(values: list[Any], same: Callable[[Any, Any], bool] | None = None) -> str:
    """Two values, for a message: two that differ, if any do."""
    same = _same_output if same is None else same
    index = next((index for index, value in enumerate(values) if not same(values[0], value)), len(values) - 1)
    return f"micro-batch 0 gave {_shown(values[0])}, micro-batch {index} gave {_shown(values[index])}"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() <= 4 and value.layout is torch.strided:
        return f"{describe(value)} {value.tolist()}"
    return describe(value)
