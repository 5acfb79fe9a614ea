"""The tensors of a step that are wrong by more than rounding."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from pippy.drivers.compare.tolerance import tolerance_of
from pippy.ir.base.trees import is_sparse

COMPARED_KINDS = ("loss", "output", "gradient", "buffer", "parameter")

ComparedKey = tuple[str, str]  # one of `COMPARED_KINDS`, and the name
Numbers = Mapping[ComparedKey, Any]  # a tensor each, or None


@dataclass(frozen=True)
class Difference:
    """A tensor of a step that is wrong. ``off`` and ``allowed`` are relative to its largest element.

    ``kind`` is "loss", "output", "gradient", "buffer" or "parameter" (after one step of the optimizers). ``stage`` is the stage
    that has it or makes it. ``why`` says in words what no number can say.
    """

    kind: str
    name: str
    off: float
    allowed: float
    stage: str = ""
    why: str = ""

    @property
    def excess(self) -> float:
        """The difference divided by the tolerance."""
        return self.off / self.allowed if self.allowed else math.inf


@dataclass(frozen=True)
class Apart:
    """The largest difference of two tensors, and the largest element of the first; or the reason why they cannot be compared.

    >>> Apart.of(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    Apart(off=1.0, size=4.0, why='')
    >>> Apart.of(torch.ones(2), torch.ones(3)).why
    'the shape is [3], and not [2]'
    """

    off: float
    size: float
    why: str = ""

    @classmethod
    def of(cls, wanted: torch.Tensor | None, number: torch.Tensor | None) -> "Apart":
        """Compare two tensors. None, as for a gradient that nobody needs, stands for zeros."""
        if wanted is None or number is None:
            there = number if wanted is None else wanted
            return cls(_size(there), 0.0 if wanted is None else _size(there)) if there is not None else cls(0.0, 0.0)
        if wanted.shape != number.shape:
            return cls(math.inf, _size(wanted), f"the shape is {list(number.shape)}, and not {list(wanted.shape)}")
        one, other = _wide(wanted), _wide(number)
        same = (one == other) | (one.isnan() & other.isnan())
        odd = int((one.isfinite() != other.isfinite()).sum())
        if odd:
            return cls(math.inf, _size(wanted), f"{odd} of {one.numel()} numbers are finite on one side only")
        return cls(_size(torch.where(same, 0.0, (one - other).abs())), _size(wanted))

    @property
    def share(self) -> float:
        """The difference as a part of the size."""
        return 0.0 if not self.off else self.off / self.size if self.size else math.inf


def _size(tensor: torch.Tensor) -> float:
    wide = _wide(tensor).abs()
    finite = wide[wide.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().to("cpu")
    dense = tensor.to_dense() if is_sparse(tensor) or tensor.layout is not torch.strided else tensor
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


@dataclass(frozen=True)
class Comparison:
    """The right numbers of a step, and their tolerances.

    ``again`` are the numbers with other rounding. ``floor`` is the least tolerance, relative to a tensor's largest element;
    that of buffers is ``of_buffers``. ``known`` has the tolerances of tensors that have no such numbers.
    """

    plain: Numbers
    again: Numbers
    floor: float
    of_buffers: float = 0.0
    known: Mapping[ComparedKey, float] = field(default_factory=dict)

    @cached_property
    def is_finite(self) -> bool:
        """Whether the right loss and gradients are finite. Others show little."""
        numbers = [each for (kind, _), each in self.plain.items() if kind in ("loss", "gradient")]
        return all(bool(each.isfinite().all()) for each in numbers if each is not None)

    def differences(self, numbers: Numbers) -> list[Difference]:
        """The tensors that are wrong, the worst first."""
        compared = [self._difference(key, numbers.get(key)) for key in self.plain]
        compared += [
            Difference(*key, math.inf, 0.0, why="the plain model has none") for key in numbers if key not in self.plain
        ]
        there = [each for each in compared if each is not None]
        return sorted(there, key=lambda each: (-each.excess, COMPARED_KINDS.index(each.kind)))

    def largest(self, numbers: Numbers) -> float:
        """The largest of all differences, relative to its tensor, or to a thousandth of the largest gradient."""
        found = [(key, Apart.of(self.plain[key], each)) for key, each in numbers.items() if key in self.plain]
        sizes = [max(apart.size, self._largest(key) / 1000) for key, apart in found]
        return max((apart.off / size for (_, apart), size in zip(found, sizes) if size), default=0.0)

    def _difference(self, key: ComparedKey, number: Any) -> Difference | None:
        apart = Apart.of(self.plain[key], number)
        if key[0] == "gradient" and number is None and apart.size:
            return Difference(*key, 1.0, 0.0, why="there is none, and the plain model has one")
        allowed = self.allowed(key, apart.size)
        if apart.off <= allowed:
            return None
        return Difference(*key, apart.share, allowed / apart.size if apart.size else 0.0, why=apart.why)

    def allowed(self, key: ComparedKey, size: float | None = None) -> float:
        """The tolerance of a tensor."""
        wanted = self.plain[key]
        size = Apart.of(wanted, wanted).size if size is None else size
        if key in self.known:
            return self.known[key] * size
        if isinstance(wanted, torch.Tensor) and not (wanted.is_floating_point() or wanted.is_complex()):
            return 0.0
        noise = Apart.of(wanted, self.again[key]).off if key in self.again else 0.0
        floor = self.of_buffers if key[0] == "buffer" else self.floor
        return tolerance_of(size, noise, self._largest(key), floor)

    def _largest(self, key: ComparedKey) -> float:
        """The largest element of all tensors of a kind. A gradient that should be 0 is compared with it."""
        return self._largest_gradient if key[0] == "gradient" else 0.0

    @cached_property
    def _largest_gradient(self) -> float:
        sizes = [_size(each) for (kind, _), each in self.plain.items() if kind == "gradient" and each is not None]
        return max(sizes, default=0.0)
