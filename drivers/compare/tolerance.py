"""When two tensors that should be equal are equal: the rounding is measured, not guessed.

The same rows in another order differ by rounding alone. The difference that this makes to a tensor is its ``noise``: another
division of the rows may change the tensor by about as much. The least tolerance of a dtype is for a tensor without noise.
"""

from dataclasses import dataclass

import torch

_TIMES = 30.0  # the noise
_MOST = 1e-2  # of the size: what moves more by another order depends on the order
_FLOORS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex128: 1e-12, torch.complex64: 1e-5}
_NARROW = 5e-2
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
        (_FLOORS.get(each, _NARROW) for each in dtypes if each.is_floating_point or each.is_complex), default=0.0
    )


@dataclass(frozen=True)
class Tolerance:
    """By how much a tensor may differ. ``size`` is its largest element, ``largest`` that of all tensors beside it.

    A gradient that is 0 but for rounding, as of the bias of keys in attention, is compared with ``largest``.

    >>> Tolerance(size=1.0, noise=1e-7, largest=1.0, floor=1e-5).allowed
    1e-05
    >>> Tolerance(size=1.0, noise=0.5, largest=1.0, floor=1e-5).allowed
    0.01
    """

    size: float
    noise: float
    largest: float
    floor: float

    @property
    def allowed(self) -> float:
        least = max(self.floor * self.size, self.floor / 10 * self.largest)
        return max(least, min(_TIMES * self.noise, max(_MOST, self.floor) * self.size))
