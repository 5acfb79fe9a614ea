"""Sparse tensors: the plain tensors that they are made of, and what torch has for plain tensors only.

layout                     parts                                        rows that can be cut
-------------------------  -------------------------------------------  --------------------------
sparse_coo                 indices, values; coalesced or not            along any dimension
sparse_csr, sparse_csc     compressed indices, plain indices, values    along both dimensions
sparse_bsr, sparse_bsc     compressed indices, plain indices, values    none: they are in blocks
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

_BY_ROW, _BY_COLUMN = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
_LAYOUTS = frozenset({torch.sparse_coo, *_BY_ROW, *_BY_COLUMN})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class SparseForm(NamedTuple):
    """All of a sparse tensor but its parts. ``coalesced`` is None where the layout does not know the word."""

    layout: torch.layout
    shape: torch.Size
    coalesced: bool | None
    requires_grad: bool


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sparse, in one of torch's layouts, and no tensor of a class of its own."""
    return tensor.layout in _LAYOUTS and type(tensor) in _PLAIN


def parts_of(tensor: torch.Tensor) -> tuple[SparseForm, tuple[torch.Tensor, ...]]:
    """The form and the parts of a sparse tensor. The parts share its memory.

    >>> form, parts = parts_of(torch.eye(2).to_sparse())
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
    """The sparse tensor that `parts_of` took apart. torch's way to unpickle one would keep it for ever, to check it later."""
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
