"""The kind of a value: a tensor with so many dimensions, a number, a container of kinds. Forward is traced for one kind.

The kind of an argument of an exported program says more: the dtypes of its tensors, the sizes that are not free, and its
numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pippy.ir.base.readable import count_with_noun
from pippy.ir.base.trees import UNKNOWN, children, describe, steps


class Elsewhere:
    """Stands for a value that this process does not have. Its kind is checked in the process that has it.

    >>> list(kind_of(torch.ones(2)).differences(Elsewhere(), "x"))
    []
    """


@dataclass(frozen=True)
class KindDifference:
    """A difference of kinds: its path in the value, what is there, and what should be there."""

    path: str
    found: str
    fixed: str


@dataclass(frozen=True)
class TensorKind:
    """A tensor. ``sizes`` has None for each size that is free; it is empty if all are."""

    dims: int
    dtype: torch.dtype | None = None
    sizes: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        if self.dtype is None:
            return f"a tensor of {count_with_noun(self.dims, 'dimension')}"
        sizes = ", ".join("any" if size is None else str(size) for size in self.sizes)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"

    def differences(self, value: Any, path: str) -> Iterator[KindDifference]:
        fits = isinstance(value, torch.Tensor) and value.dim() == self.dims
        if isinstance(value, Elsewhere):
            return
        if not fits or self.dtype not in (None, value.dtype):
            yield KindDifference(path, describe(value), str(self))

    def tensors(self, value: Any, path: str) -> Iterator[tuple[str, "TensorKind", Any]]:
        yield path, self, value


@dataclass(frozen=True)
class ConstantKind:
    """A value without tensors: of a class, or equal to one value."""

    of_class: type
    value: Any = UNKNOWN  # it may be any of the class

    def __str__(self) -> str:
        return f"of class {self.of_class.__name__}" if self.value is UNKNOWN else describe(self.value)

    def differences(self, value: Any, path: str) -> Iterator[KindDifference]:
        if isinstance(value, Elsewhere):
            return
        if type(value) is not self.of_class or (self.value is not UNKNOWN and value != self.value):
            yield KindDifference(path, describe(value), str(self))

    def tensors(self, value: Any, path: str) -> Iterator[tuple[str, TensorKind, Any]]:
        yield from ()


@dataclass(frozen=True)
class ContainerKind:
    """A container. ``parts`` has the kinds of its items, by their paths: ``['ids']``, ``[0]``, ``.loss``."""

    of_class: type
    parts: dict[str, "ArgumentKind"]

    def __str__(self) -> str:
        return f"{self.of_class.__name__}({', '.join(map(str, self.parts.values()))})"

    def differences(self, value: Any, path: str) -> Iterator[KindDifference]:
        if isinstance(value, Elsewhere):
            return
        if type(value) is not self.of_class:
            yield KindDifference(path, describe(value), str(self))
            return
        items = items_by_path(value)
        for step, kind in self.parts.items():
            if step in items:
                yield from differences(kind, items[step], path + step)
            else:
                yield KindDifference(path + step, "not there", str(kind))
        for step in items.keys() - self.parts.keys():
            yield KindDifference(path + step, describe(items[step]), "not there")

    def tensors(self, value: Any, path: str) -> Iterator[tuple[str, TensorKind, Any]]:
        items = items_by_path(value)
        for step, kind in self.parts.items():
            yield from kind.tensors(items[step], path + step)


ArgumentKind = TensorKind | ConstantKind | ContainerKind


class InPieces:
    """A value in pieces, one for each micro-batch: ``values``. Each is of the kind of the value."""

    values: tuple[Any, ...]


def differences(kind: ArgumentKind, value: Any, path: str) -> Iterator[KindDifference]:
    """Where a value is not of this kind."""
    if isinstance(value, InPieces):
        for index, piece in enumerate(value.values):
            yield from kind.differences(piece, f"{path}, micro-batch {index},")
    else:
        yield from kind.differences(value, path)


_OfTensor = Callable[[torch.Tensor], TensorKind]
_OfConstant = Callable[[Any], ConstantKind]


def kind_of(
    value: Any,
    of_tensor: _OfTensor = lambda tensor: TensorKind(tensor.dim()),
    of_constant: _OfConstant = lambda constant: ConstantKind(type(constant)),
) -> ArgumentKind:
    """The kind of a value.

    >>> kind = kind_of({"ids": torch.zeros(2, 3), "n": 1})
    >>> list(kind.differences({"ids": torch.ones(7, 5), "n": 2}, "batch"))
    []
    >>> for each in kind.differences({"ids": torch.zeros(2)}, "batch"):
    ...     print(each.path, "|", each.found, "|", each.fixed)
    batch['ids'] | float32[2] | a tensor of 2 dimensions
    batch['n'] | not there | of class int
    """
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if children(value) is None:
        return of_constant(value)
    return ContainerKind(
        type(value), {step: kind_of(part, of_tensor, of_constant) for step, part in items_by_path(value).items()}
    )


def tensor_kinds(kind: ArgumentKind) -> list[TensorKind]:
    """The kinds of all tensors in a value of this kind."""
    if isinstance(kind, ContainerKind):
        return [each for part in kind.parts.values() for each in tensor_kinds(part)]
    return [kind] if isinstance(kind, TensorKind) else []


def items_by_path(container: Any) -> dict[str, Any]:
    """The items of a container by their paths in it."""
    return dict(zip(steps(container), children(container) or ()))


def leaves_by_path(values: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of named values, by the name and the path in the value.

    >>> leaves_by_path({"x": 1, "batch": {"ids": (2, 3)}})
    {'x': 1, "batch['ids'][0]": 2, "batch['ids'][1]": 3}
    """
    by_path: dict[str, Any] = {}
    for path, value in values.items():
        if children(value) is None:
            by_path[path] = value
        else:
            by_path.update(leaves_by_path({path + step: part for step, part in items_by_path(value).items()}))
    return by_path
