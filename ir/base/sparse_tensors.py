"""Sparse and jagged tensors: what they are made of, and functions that torch has for plain tensors only.

| layout                  | parts                                        | rows that can be cut           |
|-------------------------|----------------------------------------------|--------------------------------|
| sparse_coo              | indices, values; coalesced or not            | along any dimension            |
| sparse_csr, sparse_csc  | compressed indices, plain indices, values    | along both dimensions of two   |
| sparse_bsr, sparse_bsc  | compressed indices, plain indices, values    | none: they are in blocks       |
| jagged                  | a tensor for each row                        | along the first dimension      |
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

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
