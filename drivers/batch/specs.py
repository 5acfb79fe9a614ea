"""The specs with which a user says how to cut a value into micro-batches, and how to merge the outputs of micro-batches.

A spec is given for an argument or an output as a whole, or for parts of it, in lists, tuples and dicts of the same shape.

    int, TensorChunkSpec(dim)   cut along a dimension          concatenated along it
    Replicate()                 the same for every one         the same from every one, and checked to be
    Sum(), Mean()               -                              added up; averaged over rows
    Max(), Min()                -                              the largest, the smallest, for each element
    ChunkSpec                   by its `split`                 by its `merge`
    a function                  -                              called with the list of all
    MicroBatches(values)        stands in place of the value   -
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.base.errors import MicrobatchError
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.readable import brief
from pippy.ir.base.trees import children, describe, item_names, steps
from pippy.ir.call.kinds import InPieces


@placing_words()
@dataclass(frozen=True)
class TensorChunkSpec:
    """Tensors are cut along ``dim``, or concatenated along it.

    >>> TensorChunkSpec(1)
    TensorChunkSpec(dim=1)
    """

    dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise MicrobatchError(
                f"TensorChunkSpec({brief(self.dim)}): the dimension is an int, as in TensorChunkSpec(0)"
            )


@dataclass(frozen=True)
class Replicate:
    """Every micro-batch gets the same value. An output must be the same in every micro-batch.

    >>> Replicate()
    Replicate()
    """


@dataclass(frozen=True)
class Sum:
    """The values of all micro-batches are added up, times ``weights`` if given. A value with weight 0 is left out, also a nan.

    >>> Sum(weights=(0.25, 0.75))
    Sum(weights=(0.25, 0.75))
    """

    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Mean:
    """The mean of the values of all micro-batches, each weighted by its rows.

    >>> Mean()
    Mean()
    """


@dataclass(frozen=True)
class Max:
    """The largest of the values of all micro-batches, for each element of a tensor.

    >>> Max()
    Max()
    """


@dataclass(frozen=True)
class Min:
    """The smallest of the values of all micro-batches, for each element of a tensor.

    >>> Min()
    Min()
    """


class ChunkSpec:
    """A spec of your own: derive from it and write ``split`` for arguments, ``merge`` for outputs, or both.

    >>> class EveryOther(ChunkSpec):
    ...     def split(self, value, chunks):
    ...         return [value[i::chunks] for i in range(chunks)]
    >>> EveryOther().split("abcdef", 2)
    ['ace', 'bdf']
    """

    def split(self, value: Any, chunks: int) -> Sequence[Any]:
        """The value of each micro-batch. It is called in the controller, once for each step."""
        raise MicrobatchError(
            f"{type(self).__name__} cannot cut an argument, because it has no split(value, chunks); write that method"
        )

    def merge(self, values: Sequence[Any]) -> Any:
        """One value from those of the micro-batches, in their order."""
        raise MicrobatchError(
            f"{type(self).__name__} cannot merge an output, because it has no merge(values); write that method"
        )


class MicroBatches(InPieces):
    """A value that is cut already: given in place of an argument, or of a part of one, a value for each micro-batch.

    ``dim`` is where its tensors have their rows; None if they have none, as masks that differ from micro-batch to
    micro-batch. What is given whole beside it is cut into as many rows.

    >>> MicroBatches([[1, 2], [3]]).values
    ([1, 2], [3])
    """

    def __init__(self, values: Sequence[Any], dim: int | None = 0) -> None:
        if not isinstance(values, (list, tuple)):
            raise MicrobatchError(
                f"MicroBatches takes a list with a value for each micro-batch, not {describe(values)}; a tensor that is to be "
                "cut needs no spec, or TensorChunkSpec(dim)"
            )
        self.values, self.dim = tuple(values), dim

    def __repr__(self) -> str:
        return f"MicroBatches([{', '.join(map(describe, self.values))}])"


_BUILT_IN = (TensorChunkSpec, Replicate, Sum, Mean, Max, Min, ChunkSpec)


def can_have_rows(value: Any) -> bool:
    """Whether a value is a tensor with a dimension, along which rows can be."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def is_spec(spec: Any) -> bool:
    """Whether ``spec`` is a spec, and not a container of specs."""
    return isinstance(spec, _BUILT_IN)


def as_spec(spec: Any) -> Any:
    """A spec with an int spelled out.

    >>> as_spec(1), as_spec(None)
    (TensorChunkSpec(dim=1), None)
    """
    return TensorChunkSpec(spec) if isinstance(spec, int) and not isinstance(spec, bool) else spec


def items_with_paths(value: Any, path: str) -> list[tuple[str, Any]] | None:
    """The items of a container, each with its path for messages; None for a leaf.

    >>> items_with_paths({"a": 1}, "x")
    [("x['a']", 1)]
    """
    held = None if isinstance(value, MicroBatches) else children(value)
    if held is None:
        return None
    return [(path + step, item) for step, item in zip(steps(value), held)]


def specs_of_items(spec: Any, value: Any, path: str) -> list[Any]:
    """The spec of each value in a container: its own spec, or the one for the whole container.

    >>> specs_of_items({"b": Replicate()}, {"a": 1, "b": 2}, "x")
    [None, Replicate()]
    >>> specs_of_items(1, (1, 2), "x")
    [1, 1]
    """
    held = children(value) or ()
    if spec is None or isinstance(spec, int) or is_spec(spec):
        return [spec] * len(held)
    names = item_names(value)
    by_name = _specs_by_item(spec)
    if names is not None and by_name is not None:
        unknown = [name for name in by_name if name not in names]
        if unknown:
            raise MicrobatchError(f"the spec for {path} names {unknown}, but {path} only has {names}")
        return [by_name.get(name) for name in names]
    inside = children(spec)
    if inside is None or by_name is not None or len(inside) != len(held):
        raise MicrobatchError(
            f"the spec for {path} is {describe(spec)}, and {path} is {describe(value)}; give one spec for all of it, or specs "
            "in the same shape"
        )
    return list(inside)


def _specs_by_item(spec: Any) -> dict[Any, Any] | None:
    names = item_names(spec)
    return None if names is None else dict(zip(names, children(spec) or ()))


def spec_of_parts(value: Any, path: str, written: Callable[[Any, str], str]) -> str:
    """The spec for a container, as it is written: ``written`` gives the text for each value in it, by its path.

    >>> spec_of_parts({"a": 1, "b": [2, 3]}, "x", lambda value, path: "Sum()" if path == "x['b']" else "None")
    "{'b': Sum()}"
    """
    held = items_with_paths(value, path) or []
    texts, names = [written(item, where) for where, item in held], item_names(value)
    if all(text == "None" for text in texts):
        return "None"
    if names is None:
        return f"[{', '.join(texts)}]"
    return f"{{{', '.join(f'{name!r}: {text}' for name, text in zip(names, texts) if text != 'None')}}}"


def unsuitable_spec(spec: Any, path: str, value: Any) -> MicrobatchError:
    """The error for a spec that does not suit a value."""
    return MicrobatchError(
        f"the spec for {path} is {brief(spec)}, and {path} is {describe(value)}; a spec is a dimension, TensorChunkSpec(dim), "
        "Replicate() or a ChunkSpec of your own, and for outputs also Sum(), Mean(), Max(), Min() or a function of the "
        "list of values"
    )
