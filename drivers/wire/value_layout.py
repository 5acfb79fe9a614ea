"""What a value looks like without its bytes, so that bytes alone need to travel.

A value is taken apart into three:

- plain tensors, which are written as bytes; the parts of sparse tensors are among them;
- constants (None, True, a dtype) and the structure, which make the layout: it is sent once for all values that share it;
- all other leaves, the rest, which is pickled along with each value. A rest that is one string of bytes is not pickled.
"""

import copy
import dataclasses
import pickle
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from pippy.drivers.wire.pickling import pickle_to_bytes
from pippy.ir.base.trees import SparseForm, children, form_and_parts, from_parts, is_sparse, map_leaves

ALIGNMENT = 64
_CONSTANTS = frozenset({type(None), bool, torch.dtype, torch.device})
_NUMBERS = frozenset(
    {int, float, complex, str, bytes}
)  # pickled alike by both picklers, and much faster by the plain one
_REST, _BYTES = "rest", "bytes"
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class LeafIndex:
    """Stands for a leaf in the structure of a value: for a tensor (0 and up) or for one of the rest (-1 and down)."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class SparseLayout:
    """Stands for a sparse tensor in the structure of a value: its form, and the indices of its parts."""

    __slots__ = ("form", "parts")

    def __init__(self, form: SparseForm, parts: Sequence[LeafIndex]) -> None:
        self.form, self.parts = form, parts


@dataclasses.dataclass(frozen=True, slots=True)
class TensorLayout:
    """What a tensor is and where its bytes begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class ValueLayout:
    """A value without its bytes.

    ``structure`` is the value with a LeafIndex for each tensor and each leaf of the rest. ``size`` is what the tensors take
    in memory, ``payload`` their bytes without gaps. ``rest_is_bytes`` says that the rest is one string of bytes.
    """

    structure: Any
    tensors: tuple[TensorLayout, ...]
    size: int
    payload: int
    rest_is_bytes: bool = False


NO_LAYOUT = ValueLayout(None, (), 0, 0)


@dataclasses.dataclass(slots=True)
class Parts:
    """A value taken apart. Two values with equal signatures have the same layout."""

    signature: Hashable
    tensors: list[torch.Tensor]
    rest: list[Any]


def take_apart(value: Any) -> Parts:
    """The tensors of a value, the rest of its leaves, and the signature of its structure and constants.

    >>> take_apart((torch.zeros(2), True)).signature == take_apart((torch.ones(2), True)).signature
    True
    >>> take_apart((torch.zeros(2), True)).signature == take_apart((torch.zeros(2), False)).signature
    False
    """
    if type(value) is torch.Tensor and is_plain_tensor(value):  # most often, so in a short way
        return Parts(_signature_of_tensor(value), [value], [])
    parts = Parts(None, [], [])
    parts.signature = _signature(value, parts)
    return parts


def layout_of(value: Any) -> ValueLayout:
    """The layout of a value.

    >>> layout_of({"a": torch.zeros(2, 3).t()}).tensors[0].stride
    (1, 3)
    """
    tensors: list[TensorLayout] = []
    rest: list[Any] = []
    end = payload = 0

    def stand_in(leaf: Any) -> Any:
        nonlocal end, payload
        if is_plain_tensor(leaf):
            tensors.append(TensorLayout(leaf.dtype, tuple(leaf.shape), strides_of(leaf), leaf.requires_grad, end))
            payload, end = payload + leaf.nbytes, end + aligned(leaf.nbytes)
            return LeafIndex(len(tensors) - 1)
        if type(leaf) in _CONSTANTS:
            return leaf
        if type(leaf) in _PLAIN and is_sparse(leaf):
            form, parts = form_and_parts(leaf)
            return SparseLayout(form, [stand_in(part) for part in parts])
        rest.append(leaf)
        return LeafIndex(-len(rest))

    structure = map_leaves(stand_in, value)
    return ValueLayout(structure, tuple(tensors), end, payload, _is_bytes(rest))


def rebuild(layout: ValueLayout, tensors: Sequence[torch.Tensor], rest: Sequence[Any]) -> Any:
    """The value from its parts."""

    def fill(leaf: Any) -> Any:
        if type(leaf) is SparseLayout:
            return from_parts(leaf.form, [tensors[part.index] for part in leaf.parts])
        if type(leaf) is not LeafIndex:
            return leaf
        return tensors[leaf.index] if leaf.index >= 0 else rest[-1 - leaf.index]

    return map_leaves(fill, layout.structure)


def rest_to_bytes(rest: list[Any]) -> bytes:
    """The leaves that are neither tensors nor constants, as bytes; classes of a script or notebook by value."""
    if not rest:
        return b""
    if _is_bytes(rest):
        return rest[0]
    if all(type(leaf) in _NUMBERS for leaf in rest):
        return pickle.dumps(rest, pickle.HIGHEST_PROTOCOL)
    return pickle_to_bytes(rest)


def rest_from_bytes(layout: ValueLayout, data: memoryview) -> Sequence[Any]:
    """What ``rest_to_bytes`` was given."""
    if layout.rest_is_bytes:
        return (bytes(data),)
    return pickle.loads(data) if data else ()


def copied(value: Any, layout: ValueLayout | None = None) -> Any:
    """A value on the CPU that shares nothing with the given one. ``layout`` is the value's, if it is known.

    >>> twos = torch.full((2, 3), 2.0).t()
    >>> copy = copied([twos, "a"])
    >>> twos.zero_().sum(), copy[0].sum(), copy[0].stride()
    (tensor(0.), tensor(12.), (1, 3))
    """
    layouts = iter((layout or layout_of(value)).tensors)

    def own(leaf: Any) -> Any:
        if is_plain_tensor(leaf):
            return _copied_tensor(leaf, next(layouts))
        if isinstance(leaf, torch.Tensor) and is_sparse(leaf):
            form, parts = form_and_parts(leaf)
            return from_parts(form, [_copied_tensor(part, next(layouts)) for part in parts])
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copy.deepcopy(leaf)

    return map_leaves(own, value)


def aligned(size: int) -> int:
    """The next multiple of the alignment.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def is_plain_tensor(leaf: Any) -> bool:
    """Whether bytes and strides are all of a tensor. Others (quantized, subclasses) are pickled by torch."""
    return type(leaf) in _PLAIN and leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_meta


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor's copy: its own, or if it is not dense those of a contiguous one.

    >>> strides_of(torch.zeros(2, 3).t()), strides_of(torch.zeros(1).expand(4))
    ((1, 3), (1,))
    """
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(
        tensor
    ):  # most are, and that is asked sooner
        return tuple(tensor.stride())
    return tuple(torch.empty(tensor.shape, device="meta").stride())


def _is_bytes(rest: list[Any]) -> bool:
    return len(rest) == 1 and type(rest[0]) is bytes


def _signature_of_tensor(value: torch.Tensor) -> Hashable:
    return value.dtype, value.shape, value.stride(), value.requires_grad


def _signature(value: Any, parts: Parts) -> Hashable:
    kind = type(value)
    if kind in _PLAIN and is_plain_tensor(value):
        parts.tensors.append(value)
        return _signature_of_tensor(value)
    if kind in _CONSTANTS:
        return kind, value
    if kind in _PLAIN and is_sparse(value):
        form, its = form_and_parts(value)
        return form, tuple([_signature(part, parts) for part in its])
    items = children(value)
    if items is None:
        parts.rest.append(value)
        return _BYTES if kind is bytes else _REST
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


def _copied_tensor(tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    own = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")
    own.copy_(tensor.detach())
    return own.requires_grad_(layout.requires_grad)
