"""Of what kind a value is: a tensor with so many dimensions, a container of such, a number. Forward is traced for one kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pippy.ir.trees import children, describe


@dataclass(frozen=True)
class Kind:
    """The kind of an example, and how it is shown.

    >>> kind = Kind.of((torch.zeros(2, 3), 1))
    >>> kind.fits((torch.ones(7, 5), 2)), kind.fits((torch.zeros(2), 1)), kind.fits([torch.zeros(2, 3), 1])
    (True, False, False)
    """

    structure: Any
    shown: str

    @staticmethod
    def of(value: Any) -> "Kind":
        return Kind(_structure(value), describe(value))

    def fits(self, value: Any) -> bool:
        return _structure(value) == self.structure


def _structure(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dim()
    held = children(value)
    if held is None:
        return type(value)
    if isinstance(value, Mapping):
        return type(value), {key: _structure(item) for key, item in value.items()}
    return type(value), tuple(map(_structure, held))
