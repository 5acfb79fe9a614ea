"""Merges the outputs of the micro-batches into what the model would have returned for the whole mini-batch.

    a tensor with the micro-batch's rows in dimension 0      concatenated
    a float tensor without dimensions (a loss, say)          the mean, weighted by rows
    anything else                                            returned once, if all micro-batches gave the same

A spec changes that: see specs.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch

from pippy.drivers.batches.specs import (
    ChunkSpec,
    Mean,
    Replicate,
    Sum,
    TensorChunkSpec,
    as_spec,
    is_spec,
    items_with_paths,
    specs_of_items,
    unsuitable_spec,
)
from pippy.drivers.errors import MicrobatchError
from pippy.ir.trees import describe, leaves, with_children


def merge_outputs(
    outputs: Sequence[Any], sizes: tuple[int, ...] | None, spec: Any = None, *, mask: bool = False
) -> Any:
    """One output from those of the micro-batches, which have ``sizes`` rows.

    With ``mask``, each has all rows of the mini-batch, and only its own rows are used.

    >>> outputs = [{"y": torch.zeros(2, 1), "loss": torch.tensor(1.0)}, {"y": torch.ones(1, 1), "loss": torch.tensor(4.0)}]
    >>> merge_outputs(outputs, sizes=(2, 1))
    {'y': tensor([[0.],
            [0.],
            [1.]]), 'loss': tensor(2.)}
    >>> merge_outputs(outputs, (2, 1), {"loss": Sum()})["loss"]
    tensor(5.)
    """
    if sizes is not None and len(sizes) != len(outputs):
        raise MicrobatchError(f"there are {len(outputs)} outputs, and sizes of {len(sizes)} micro-batches: {sizes}")
    return _Merge(sizes, mask).tree(list(outputs), spec, "output")


class LossPlace:
    """Stands for the loss inside of what a model returns: it is put together by itself, by its weights."""


LOSS_PLACE = LossPlace()


def check_leaves_loss_alone(spec: Any, value: Any, path: str = "output") -> None:
    """Raise if a spec is for the loss, or a function or ChunkSpec for something that holds it.

    >>> check_leaves_loss_alone((None, Sum()), (LOSS_PLACE, 1))
    >>> check_leaves_loss_alone(Sum(), (LOSS_PLACE, 1))  # for all of it but the loss
    >>> check_leaves_loss_alone((Sum(), None), (LOSS_PLACE, 1))
    Traceback (most recent call last):
    pippy.drivers.errors.MicrobatchError: output_spec has Sum(weights=None) for output[0], which is the loss, and the loss ...
    """
    spec = as_spec(spec)
    if spec is None or not any(leaf is LOSS_PLACE for leaf in leaves(value)):
        return
    if value is LOSS_PLACE:
        raise MicrobatchError(
            f"output_spec has {spec!r} for {path}, which is the loss, and the loss is put together by its weights; leave its "
            "place None, and say how it reduces with loss_reduction="
        )
    if isinstance(spec, ChunkSpec) or (callable(spec) and not is_spec(spec)):
        raise MicrobatchError(
            f"output_spec has {spec!r} for {path}, which holds the loss, and the loss is put together by its weights; give a "
            "spec for each part of it, with None for the loss"
        )
    if not is_spec(spec):
        items = items_with_paths(value, path) or []
        for (where, item), own in zip(items, specs_of_items(spec, value, path)):
            check_leaves_loss_alone(own, item, where)


@dataclass(frozen=True)
class _Merge:
    sizes: tuple[int, ...] | None
    mask: bool

    def tree(self, values: list[Any], spec: Any, path: str, outer: bool = True) -> Any:
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
            return self.leaf(values, spec, path, outer)
        names = [[where for where, _ in each or ()] for each in held]
        if any(each != names[0] for each in names):
            raise MicrobatchError(
                f"{path} has another shape in each micro-batch, such as {_two(values, lambda a, b: len(a) == len(b))}; "
                "give a function of the list of values that puts them together"
            )
        columns = zip(*[[item for _, item in each or ()] for each in held])
        specs, whole = specs_of_items(spec, values[0], path), is_spec(spec)
        merged = [self.tree(list(each), its, where, not whole) for each, its, where in zip(columns, specs, names[0])]
        return with_children(values[0], merged) if merged else values[0]

    def leaf(self, values: list[Any], spec: Any, path: str, outer: bool) -> Any:
        if isinstance(spec, TensorChunkSpec) and not outer and not all(_has_dimensions(value) for value in values):
            spec = None
        if spec is None:
            return self.default(values, path)
        for kind, merge in _MERGES.items():
            if isinstance(spec, kind):
                return merge(self, values, spec, path)
        raise unsuitable_spec(spec, path, values[0])

    def default(self, values: list[Any], path: str) -> Any:
        if len(values) == 1:
            return values[0]
        if self.follows(values, 0):
            return self.cat(values, TensorChunkSpec(0), path)
        if all(map(_same, values[1:], values[:-1])):
            return values[0]
        if self.sizes is not None and all(_is_scalar(value) for value in values):
            return self.mean(values, Mean(), path)
        raise MicrobatchError(
            f"{path} differs between micro-batches and does not have their rows"
            f"{'' if self.sizes is None else f' {self.sizes}'}: {_two(values, _same)}. Say how to put it together: "
            "TensorChunkSpec(dim) if its rows are in another dimension, Sum(), Mean(), or a function of the list of values"
        )

    def follows(self, values: list[Any], dim: int) -> bool:
        """Whether each value has as many rows as its micro-batch."""
        if self.sizes is None or not all(_has_dimensions(value) for value in values):
            return False
        rows = [sum(self.sizes)] * len(values) if self.mask else list(self.sizes)
        return [value.shape[dim] for value in values] == rows

    def cat(self, values: list[Any], spec: TensorChunkSpec, path: str) -> torch.Tensor:
        if not all(_has_dimensions(value) and -value.dim() <= spec.dim < value.dim() for value in values):
            raise MicrobatchError(f"{path} is {describe(values[0])}, and cannot be concatenated along {spec.dim}")
        if self.mask and self.follows(values, spec.dim):
            assert self.sizes is not None
            starts = [sum(self.sizes[:index]) for index in range(len(values))]
            values = [value.narrow(spec.dim, *own) for value, *own in zip(values, starts, self.sizes)]
        try:
            return torch.cat(values, spec.dim)
        except RuntimeError as error:
            shapes = ", ".join(map(describe, values))
            raise MicrobatchError(
                f"{path} cannot be concatenated along {spec.dim}: {error}. The micro-batches gave {shapes}; a function of the "
                "list of values can pad them"
            ) from None

    def equal(self, values: list[Any], spec: Replicate, path: str) -> Any:
        if not all(map(_same, values[1:], values[:-1])):
            raise MicrobatchError(
                f"{path} has the spec Replicate(), and differs between micro-batches: {_two(values, _same)}"
            )
        return values[0]

    def sum(self, values: list[Any], spec: Sum, path: str) -> Any:
        if spec.weights is None:
            return reduce(add, values)
        if len(spec.weights) != len(values):
            raise MicrobatchError(f"{path} has {len(spec.weights)} weights, for {len(values)} micro-batches")
        weighted = [value * weight for value, weight in zip(values, spec.weights) if weight]
        return reduce(add, weighted) if weighted else values[0] * 0

    def mean(self, values: list[Any], spec: Mean, path: str) -> Any:
        if len(values) == 1 or all(map(_same, values[1:], values[:-1])):
            return values[0]
        if self.sizes is None:
            raise MicrobatchError(f"{path} has the spec Mean(), and nothing has rows to weight by; give a function")
        rows = sum(self.sizes)
        return self.sum(values, Sum(tuple(size / rows for size in self.sizes)), path)


_MERGES: dict[type, Callable[..., Any]] = {
    TensorChunkSpec: _Merge.cat,
    Replicate: _Merge.equal,
    Sum: _Merge.sum,
    Mean: _Merge.mean,
}


def _has_dimensions(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and (value.is_floating_point() or value.is_complex())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # values that cannot be compared count as different
        return False


def _two(values: list[Any], same: Callable[[Any, Any], bool]) -> str:
    """Two values that differ, for a message."""
    index = next(index for index, value in enumerate(values) if not same(values[0], value))
    return f"micro-batch 0 gave {_shown(values[0])}, micro-batch {index} gave {_shown(values[index])}"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() <= 4:
        return f"{describe(value)} {value.tolist()}"
    return describe(value)
