"""A digest of a tensor: small, and linear, so that tensors differ by about as much as their digests do.

a gradient of 5 · n + 3 numbers            + row 0
                                           - row 1
row 0  row 1  row 2  row 3  row 4  rest    - row 2      ─▶ n sums, in float64
                                           + row 3
                                           + ...
"""

import torch

from pippy.ir.base.sparse_tensors import is_sparse

KEPT = 1 << 14  # numbers of a digest at most


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, in one dimension, if it is small; else sums of its parts with signs that look random.

    >>> digest(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([1., 2., 3., 4.])
    >>> digest(torch.ones(3 * KEPT)).shape
    torch.Size([16384])
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if is_sparse(tensor):
        return _of_sparse(tensor.to_sparse_coo().coalesce())
    flat = tensor.reshape(-1).to(torch.int8 if tensor.dtype == torch.bool else tensor.dtype)
    if flat.numel() <= KEPT:
        return flat.clone()
    sums = torch.zeros(KEPT, dtype=torch.float64, device=flat.device)
    for number, part in enumerate(flat.split(KEPT)):
        sums[: len(part)].add_(part, alpha=_sign(number))
    return sums


def bytes_of_digest(tensor: torch.Tensor) -> int:
    """How many bytes the digest of a tensor takes."""
    count = tensor.numel()
    return count * tensor.element_size() if count <= KEPT else KEPT * 8


def _sign(number: int) -> int:
    return 1 if ((number + 1) * 0x9E3779B97F4A7C15 >> 32).bit_count() % 2 else -1


def _of_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """Only what is stored is looked at: the positions of its values say to which sum each belongs."""
    strides = torch.empty(tensor.shape, device="meta").stride()
    sparse, values = tensor.indices(), tensor.values().double()
    places = sum(each * stride for each, stride in zip(sparse, strides))
    inner = torch.arange(values[0].numel() if len(values) else 0, device=values.device)
    places = (torch.as_tensor(places, device=values.device).reshape(-1, 1) + inner).reshape(-1)
    signs = torch.where(places // KEPT % 2 == 0, 1.0, -1.0)
    sums = torch.zeros(min(KEPT, tensor.numel()), dtype=torch.float64, device=values.device)
    return sums.index_add_(0, places % KEPT, values.reshape(-1) * signs)
