"""What a value looks like without its bytes, so that bytes alone need to travel.

A value is taken apart into plain tensors, which are written as bytes; a few constants (None, True, a dtype), which belong
to the layout; and all else, which is pickled along with each value. The layout is the value with numbered slots for its
tensors and the pickled rest.
"""

import dataclasses
import pickle
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import cloudpickle
import torch

from pippy.ir.trees import children, map_leaves

ALIGNMENT = 64
_CONSTANTS = frozenset({type(None), bool, torch.dtype, torch.device})
_NUMBERS = frozenset(
    {int, float, complex, str, bytes}
)  # pickled alike by both picklers, and much faster by the plain one
_REST = "rest"
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class Slot:
    """The place of a tensor (0 and up) or of a pickled leaf (-1 and down) in a value."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPlace:
    """What a tensor is and where its bytes begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A value without its bytes. ``size`` is what they take in memory, ``payload`` what they are without gaps."""

    skeleton: Any
    places: tuple[TensorPlace, ...]
    size: int
    payload: int


@dataclasses.dataclass(slots=True)
class Parts:
    """A value taken apart. Two values with equal signatures have the same layout."""

    signature: Hashable
    tensors: list[torch.Tensor]
    rest: list[Any]


def take_apart(value: Any) -> Parts:
    """The tensors of a value, the leaves to be pickled, and the signature of all else.

    >>> take_apart((torch.zeros(2), True)).signature == take_apart((torch.ones(2), True)).signature
    True
    >>> take_apart((torch.zeros(2), True)).signature == take_apart((torch.zeros(2), False)).signature
    False
    """
    parts = Parts(None, [], [])
    parts.signature = _signature(value, parts)
    return parts


def layout_of(value: Any) -> Layout:
    """The layout of a value.

    >>> layout_of({"a": torch.zeros(2, 3).t()}).places[0].stride
    (1, 3)
    """
    places: list[TensorPlace] = []
    rest = end = payload = 0

    def slot(leaf: Any) -> Any:
        nonlocal rest, end, payload
        if is_plain_tensor(leaf):
            stride = tuple(leaf.stride()) if _is_dense(leaf) else tuple(torch.empty(leaf.shape, device="meta").stride())
            places.append(TensorPlace(leaf.dtype, tuple(leaf.shape), stride, leaf.requires_grad, end))
            size = leaf.numel() * leaf.itemsize
            payload, end = payload + size, end + aligned(size)
            return Slot(len(places) - 1)
        if type(leaf) in _CONSTANTS:
            return leaf
        rest += 1
        return Slot(-rest)

    skeleton = map_leaves(slot, value)
    return Layout(skeleton, tuple(places), end, payload)


def rebuild(layout: Layout, tensors: Sequence[torch.Tensor], rest: Sequence[Any]) -> Any:
    """The value from its parts."""

    def fill(leaf: Any) -> Any:
        if type(leaf) is not Slot:
            return leaf
        return tensors[leaf.index] if leaf.index >= 0 else rest[-1 - leaf.index]

    return map_leaves(fill, layout.skeleton)


def pickled(rest: list[Any]) -> bytes:
    """The leaves that are no tensors, as bytes; classes of a script or notebook by value."""
    if not rest:
        return b""
    if all(type(leaf) in _NUMBERS for leaf in rest):
        return pickle.dumps(rest, pickle.HIGHEST_PROTOCOL)
    return cloudpickle.dumps(rest, pickle.HIGHEST_PROTOCOL)


def aligned(size: int) -> int:
    """The next multiple of the alignment.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def is_plain_tensor(leaf: Any) -> bool:
    """Is it a tensor whose bytes and strides say all? Others (sparse, quantized, subclasses) are pickled by torch."""
    return type(leaf) in _PLAIN and leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_meta


def _is_dense(tensor: torch.Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _signature(value: Any, parts: Parts) -> Hashable:
    kind = type(value)
    if kind in _PLAIN and is_plain_tensor(value):
        parts.tensors.append(value)
        return value.dtype, value.shape, value.stride(), value.requires_grad
    if kind in _CONSTANTS:
        return kind, value
    items = children(value)
    if items is None:
        parts.rest.append(value)
        return _REST
    return kind, _form(value), tuple([_signature(item, parts) for item in items])


def _form(value: Any) -> Hashable:
    """What a container is beside its type and its children. If that is not known, something that equals nothing else."""
    if isinstance(value, (tuple, list)):
        return None
    if dataclasses.is_dataclass(value):
        own = getattr(value, "__dict__", {})
        known = len(own) in (0, len(dataclasses.fields(value)))
        return _keys(value) if known and isinstance(value, Mapping) else None if known else object()
    return _keys(value) if type(value) in (dict, OrderedDict) else object()


def _keys(value: Mapping[Any, Any]) -> Hashable:
    if all(type(key) is str for key in value):
        return tuple(value)
    if all(type(key) in (str, int, bool) for key in value):
        return tuple([(type(key), key) for key in value])
    return object()
