"""When two tensors that should be equal are equal: the rounding is measured, not guessed.

The same step in 64 bits differs by rounding alone. The difference that this makes to a tensor is its ``noise``: another
division of the rows may change the tensor by about as much. What is in 64 bits already has its rows in another order instead,
which a model that mixes rows shows, too: such noise has a limit. The least tolerance of a dtype is for a tensor without noise.
Of large tensors, digests are compared. A model of 16 bits can be compared in 32.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from pippy.ir.base.names import named_state
from pippy.ir.base.trees import is_sparse, map_tensors

_TIMES = 30.0  # the noise
_MOST = 1e-2  # of the size: what moves more is not rounding
_MOST_OF_64 = 1e-5  # the same, where all is computed in 64 bits
_FLOORS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex128: 1e-12, torch.complex64: 1e-5}
_NARROW_FLOOR = 5e-2
LEAST = (
    1e-6  # between divisions: a part of a model of float64 may compute in float32, which another order does not show
)

ACROSS = 1e-3  # between a CPU and a GPU, which multiplies float32 in parts of fewer bits where torch lets it


def floor_of(*dtypes: torch.dtype) -> float:
    """The least tolerance, relative to a tensor's largest element, for the dtype of these that rounds most.

    >>> floor_of(torch.float64, torch.float32)
    1e-05
    """
    return max(
        (_FLOORS.get(each, _NARROW_FLOOR) for each in dtypes if each.is_floating_point or each.is_complex), default=0.0
    )


def tolerance_of(size: float, noise: float, largest: float, floor: float) -> float:
    """By how much a tensor may differ. ``size`` is its largest element, ``largest`` that of all tensors beside it.

    A gradient that is 0 but for rounding, as of the bias of keys in attention, is compared with ``largest``.

    >>> tolerance_of(size=1.0, noise=1e-7, largest=1.0, floor=1e-5)
    1e-05
    >>> tolerance_of(size=1.0, noise=0.5, largest=1.0, floor=1e-5)
    0.01
    >>> tolerance_of(size=1.0, noise=0.5, largest=1.0, floor=1e-6)
    1e-05
    """
    least = max(floor * size, floor / 10 * largest)
    most = max(_MOST, floor) if floor > LEAST else _MOST_OF_64
    return max(least, min(_TIMES * noise, most * size))


# A digest of a tensor: small, and linear, so that tensors differ by about as much as their digests do.
#
# a gradient of 5 · n + 3 numbers            + row 0
#                                            - row 1
# row 0  row 1  row 2  row 3  row 4  rest    - row 2      ─▶ n sums, in float64
#                                            + row 3
#                                            + ...


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


# Computes in 32 bits what a model computes in 16: with few bits, a part of a gradient that is lost looks like rounding. And in
# 64 bits, to see what is rounding.


NARROW = (torch.float16, torch.bfloat16)
_NARROWER = {None: (), torch.float32: NARROW, torch.float64: (*NARROW, torch.float32)}
Tree = TypeVar("Tree")


@contextmanager
def widened(modules: Iterable[nn.Module], wide: torch.dtype | None = torch.float32) -> Iterator[None]:
    """Inside, the parameters and buffers of modules that have fewer bits are ``wide``. Nothing happens if that is None.

    >>> linear = nn.Linear(2, 2).bfloat16()
    >>> with widened([linear]):
    ...     linear(torch.ones(1, 2)).dtype
    torch.float32
    >>> linear.weight.dtype
    torch.bfloat16
    """
    found = {id(each): each for module in modules for _, each in named_state(module)} if wide else {}
    before = [(each, each.data) for each in found.values() if each.dtype in _NARROWER[wide]]
    try:
        for each, data in before:
            each.data = data.to(wide)
        yield
    finally:
        for each, data in before:
            each.grad = None
            each.data = data


def wide_tensors(tree: Tree, wide: torch.dtype | None = torch.float32) -> Tree:
    """A tree with tensors of this dtype in place of those of fewer bits."""
    return map_tensors(lambda each: each.to(wide) if each.dtype in _NARROWER[wide] else each, tree)
