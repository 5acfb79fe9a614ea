"""Values with tensors inside: containers of all kinds, those of torch's pytree registry among them, and sparse tensors.

Any other value that is no tensor is a constant of the pipeline. The gradient of a container is the tuple of its children's
gradients, for every kind of container. The gradient of a constant is None.

`torch.utils._pytree` would treat some classes differently, unless somebody registers them:

    class                                   torch.utils._pytree     here
    ───────────────────────────────────────────────────────────────────────────────────
    dataclass                               a leaf                  a container
    subclass of dict, list or tuple         a leaf                  a container
    any other Mapping                       a leaf                  a container
    torch.Size, GradientEdge                a container             a leaf

A container that is taken for a leaf gets no gradients. Each value that goes from stage to stage passes through `map_leaves`,
which is two to five times as fast as `tree_map`.

A sparse or jagged tensor is made of plain ones, its parts. Here are functions that torch has for plain tensors only:

    layout                    parts                                        rows that can be cut
    ─────────────────────────────────────────────────────────────────────────────────────────────────
    sparse_coo                indices, values; coalesced or not            along any dimension
    sparse_csr, sparse_csc    compressed indices, plain indices, values    along both dimensions of two
    sparse_bsr, sparse_bsc    compressed indices, plain indices, values    none: they are in blocks
    jagged                    a tensor for each row                        along the first dimension
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree

from pippy.ir.base.readable import brief

_BY_ROW, _BY_COLUMN = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
_LAYOUTS = frozenset({torch.sparse_coo, *_BY_ROW, *_BY_COLUMN})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class SparseForm(NamedTuple):
    """All of a sparse tensor but its parts. ``coalesced`` is None for layouts other than COO."""

    layout: torch.layout
    shape: torch.Size
    coalesced: bool | None
    requires_grad: bool


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sparse, in one of torch's layouts, and no tensor of a class of its own."""
    return tensor.layout in _LAYOUTS and type(tensor) in _PLAIN


def form_and_parts(tensor: torch.Tensor) -> tuple[SparseForm, tuple[torch.Tensor, ...]]:
    """The form and the parts of a sparse tensor. The parts share its memory.

    >>> form, parts = form_and_parts(torch.eye(2).to_sparse())
    >>> from_parts(form, parts).to_dense()
    tensor([[1., 0.],
            [0., 1.]])
    """
    plain = tensor.detach()
    coalesced = plain.is_coalesced() if plain.layout is torch.sparse_coo else None
    if coalesced is not None:
        parts: tuple[torch.Tensor, ...] = (plain._indices(), plain._values())
    elif plain.layout in _BY_ROW:
        parts = plain.crow_indices(), plain.col_indices(), plain.values()
    else:
        parts = plain.ccol_indices(), plain.row_indices(), plain.values()
    return SparseForm(plain.layout, plain.shape, coalesced, tensor.requires_grad), parts


def from_parts(form: SparseForm, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sparse tensor that has this form and these parts. One that torch unpickles stays alive for ever."""
    layout, shape, coalesced, requires_grad = form
    if layout is torch.sparse_coo:
        indices, values = parts
        tensor = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)
    else:
        compressed, others, values = parts
        tensor = torch.sparse_compressed_tensor(
            compressed, others, values, shape, layout=layout, check_invariants=False
        )
    return tensor.requires_grad_() if requires_grad else tensor


def plain_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that take the memory of a tensor: the parts of a sparse one, and any other itself."""
    return form_and_parts(tensor)[1] if is_sparse(tensor) else (tensor,)


def map_stored(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Apply a function to all values of a tensor; of a sparse tensor, to those that it stores."""
    if not is_sparse(tensor):
        return function(tensor)
    form, (*indices, values) = form_and_parts(tensor)
    return from_parts(form, [*indices, function(values)])


def vector_norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """`torch.linalg.vector_norm` of a tensor that may be sparse.

    >>> vector_norm(torch.tensor([0.0, 3.0, 4.0]).to_sparse(), 2.0)
    tensor(5.)
    """
    if tensor.layout not in _LAYOUTS:
        return torch.linalg.vector_norm(tensor, norm_type)
    tensor = tensor.detach()
    stored = (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()
    numbers = stored.flatten()
    if stored.numel() < tensor.numel():  # the norms of negative order see the zeros, too
        numbers = torch.cat([numbers, numbers.new_zeros(1)])
    return torch.linalg.vector_norm(numbers, norm_type)


def has_rows(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be cut with `narrow`, and put together with `cat`."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc):
        return tensor.dim() == 2
    return tensor.layout in (torch.strided, torch.sparse_coo, torch.jagged)


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """A jagged tensor of these rows."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def narrow(tensor: torch.Tensor, dim: int, start: int, size: int) -> torch.Tensor:
    """Some rows of a tensor that `has_rows`: a view, or of a sparse tensor a sparse tensor.

    >>> narrow(torch.eye(3).to_sparse(), 0, 1, 2).to_dense()
    tensor([[0., 1., 0.],
            [0., 0., 1.]])
    """
    if tensor.layout is torch.strided:
        return tensor.narrow(dim, start, size)
    if tensor.layout is torch.jagged:
        return _joined(tensor.detach().unbind()[start : start + size])
    rows = tensor.to_sparse_coo().narrow_copy(dim, start, size)
    return rows if tensor.layout is torch.sparse_coo else rows.to_sparse(layout=tensor.layout)


def cat(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """`torch.cat`, of sparse and jagged tensors too: the result has the layout of the first."""
    layout = tensors[0].layout
    if layout is torch.jagged:
        return _joined([row for tensor in tensors for row in tensor.unbind()])
    if layout in (torch.strided, torch.sparse_coo):
        return torch.cat(tuple(tensors), dim)
    return torch.cat([tensor.to_sparse_coo() for tensor in tensors], dim).to_sparse(layout=layout)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """`torch.equal`, of sparse tensors too; zeros may be stored or not.

    >>> equal(torch.eye(2).to_sparse(), torch.eye(2).to_sparse() * 2)
    False
    """
    if one.layout is torch.strided or one.layout != other.layout:
        return one.layout == other.layout and torch.equal(one, other)
    return one.shape == other.shape and all(map(torch.equal, _entries(one), _entries(other)))


def _entries(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and values of what is not zero, in a fixed order."""
    entries = tensor.detach().to_sparse_coo().coalesce()
    nonzero = (entries.values() != 0).flatten(1).any(1) if entries.dense_dim() else entries.values() != 0
    return entries.indices()[:, nonzero], entries.values()[nonzero]


class Unknown(Enum):
    """The class of `UNKNOWN`."""

    UNKNOWN = "unknown"

    def __repr__(self) -> str:
        return self.name


UNKNOWN: Final = Unknown.UNKNOWN
"""Stands for a value, or a fact about one, of which nothing is known. It is itself in each process."""


def children(value: Any) -> Sequence[Any] | None:
    """The items of a container, in a fixed order; None if ``value`` is no container.

    >>> children({"a": 1, "b": (2, 3)})
    [1, (2, 3)]
    """
    if isinstance(value, (torch.Tensor, torch.Size, GradientEdge)) or value is None:
        return None
    if isinstance(value, (tuple, list)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return list(value.values())
    if type(value) in _pytree.SUPPORTED_NODES:
        return _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
    return None


def with_children(value: Any, items: Sequence[Any]) -> Any:
    """A container of the same type and shape that holds ``items``."""
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(items)  # past a constructor that checks them, as that of a PackedSequence
    if isinstance(value, (tuple, list)):
        return type(value)(items)
    if dataclasses.is_dataclass(value):
        changed = copy.copy(value)
        for field, item in zip(dataclasses.fields(value), items):
            object.__setattr__(changed, field.name, item)
            if isinstance(changed, dict) and field.name in changed:  # model outputs of transformers have both
                dict.__setitem__(changed, field.name, item)
        return changed
    if isinstance(value, Mapping):
        return _mapping_like(value, dict(zip(value, items)))
    node = _pytree.SUPPORTED_NODES[type(value)]
    return node.unflatten_fn(list(items), node.flatten_fn(value)[1])


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    changed = copy.copy(value)
    changed.update(items)  # type: ignore[attr-defined]
    return changed


def item_names(container: Any) -> list[Any] | None:
    """The names of the items of a container; None if they have none."""
    if isinstance(container, tuple):
        return list(getattr(container, "_fields", ())) or None
    if dataclasses.is_dataclass(container):
        return [field.name for field in dataclasses.fields(container)]
    return list(container) if isinstance(container, Mapping) else None


def steps(container: Any) -> list[str]:
    """The path to each item of a container, as Python writes it.

    >>> steps({"a": 1}), steps([1, 2])
    (["['a']"], ['[0]', '[1]'])
    """
    names = item_names(container)
    if names is None:
        return [f"[{index}]" for index in range(len(children(container) or ()))]
    is_plain = isinstance(container, Mapping) and not dataclasses.is_dataclass(container)
    return [f"[{name!r}]" if is_plain else f".{name}" for name in names]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every leaf replaced by ``function(leaf)``."""
    held = children(value)
    if held is None:
        return function(value)
    return with_children(value, [map_leaves(function, item) for item in held])


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor replaced by ``function(tensor)``.

    >>> map_tensors(torch.neg, [torch.tensor(1), "a"])
    [tensor(-1), 'a']
    """
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def map_instances(kind: type, function: Callable[[Any], Any], argument: Any) -> Any:
    """An argument of a call in a graph, with ``function(each)`` in place of each object of a class.

    >>> map_instances(int, str, (1, [2, "x"]))
    ('1', ['2', 'x'])
    """
    if isinstance(argument, kind):
        return function(argument)
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(map_instances(kind, function, item) for item in argument))
    if isinstance(argument, (tuple, list)):
        items = [map_instances(kind, function, item) for item in argument]
        return tuple(items) if isinstance(argument, tuple) else items
    if isinstance(argument, slice):
        return slice(*(map_instances(kind, function, each) for each in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, dict):
        return {key: map_instances(kind, function, item) for key, item in argument.items()}
    return argument


def leaves(value: Any) -> Iterator[Any]:
    """All leaves, in a fixed order."""
    held = children(value)
    if held is None:
        yield value
    else:
        for item in held:
            yield from leaves(item)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors, in a fixed order."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def nbytes(value: Any) -> int:
    """The bytes of all elements of all tensors; of a sparse tensor those that it stores.

    >>> nbytes([torch.zeros(2, 3), "a", torch.zeros(4, dtype=torch.int64)])
    56
    """
    return sum(map(_tensor_bytes, tensors(value)))


def _tensor_bytes(tensor: torch.Tensor) -> int:
    if is_sparse(tensor):
        return sum(part.nbytes for part in form_and_parts(tensor)[1])
    return tensor.numel() * tensor.element_size()


_MANY_CHARACTERS = 200


def describe(value: Any) -> str:
    """A value in a few characters, for error messages and tables.

    >>> describe((torch.zeros(2, 3), None, 7))
    '(float32[2, 3], None, 7)'
    >>> describe([1, 2] * 500)
    'list of 1000, the first 1'
    """
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} "
        return f"{layout}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    held = children(value)
    if held is not None:
        inside = ", ".join(map(describe, held))
        if len(inside) > _MANY_CHARACTERS and len(set(map(type, held))) == 1:
            return f"{type(value).__name__} of {len(held)}, the first {describe(next(iter(held)))}"
        inside = inside if len(inside) <= 3 * _MANY_CHARACTERS else f"{inside[: 3 * _MANY_CHARACTERS]}..."
        return f"({inside})" if isinstance(value, tuple) else f"{type(value).__name__}({inside})"
    text = brief(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
