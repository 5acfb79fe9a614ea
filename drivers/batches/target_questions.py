"""What a loss asks of its targets: whether one is a number, or is more than it. So it may leave some of them out.

While the answer is the same for all targets of a step, nobody can see what the loss does with it. So the controller looks for
the first step that holds different answers: there the loss is checked again. See loss_check.py.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.batches.division import CutTensor, DividedValue, SameForAll
from pippy.ir.trees import children, leaves


@dataclass(frozen=True)
class Question:
    """Whether targets are ``sign`` (==, !=, >, >= or nan) ``value``: of one tensor of an input, or of all that hold integers.

    >>> division_of_targets = {"target": SameForAll(torch.tensor([1, 2, 7]))}
    >>> Question("==", 7).is_held(division_of_targets), Question("==", 3).is_held(division_of_targets)
    (True, False)
    >>> Question(">", 0).is_held(division_of_targets), Question(">", 1).examples()
    (False, (1, 2))
    """

    sign: str
    value: float
    place: tuple[str, int] | None = None  # the name of an input, and the number of a tensor in it

    def is_held(self, arguments: Mapping[str, Any]) -> bool:
        """Whether some of the values for which it is asked have another answer than the rest."""
        return any(self._differs(tensor) for name in arguments for tensor in self._tensors(name, arguments[name]))

    def _tensors(self, name: str, divided: Any) -> Iterator[torch.Tensor]:
        for number, column in enumerate(_columns(divided)):
            if self.place is None or self.place == (name, number):
                strided = (leaf for leaf in column if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
                yield from (leaf for leaf in strided if self.place or is_index(leaf))

    def _differs(self, tensor: torch.Tensor) -> bool:
        if self.sign in (">", ">="):
            answers = tensor > self.value if self.sign == ">" else tensor >= self.value
            return bool(answers.any()) and not bool(answers.all())
        if self.sign == "nan":
            return bool(tensor.isnan().any())
        return bool((tensor == self.value if self.sign == "==" else tensor != self.value).any())

    def examples(self) -> tuple[float, ...]:
        """Targets with different answers; for == the one that is asked for, as others are there."""
        return {
            "==": (self.value,),
            "!=": (0 if self.value else 1,),
            ">": (math.floor(self.value), math.floor(self.value) + 1),
            ">=": (math.ceil(self.value) - 1, math.ceil(self.value)),
            "nan": (math.nan,),
        }[self.sign]

    def counts(self, expression: str) -> Iterator[str]:
        """How those with each answer are counted, as it is written."""
        if self.sign == "nan":
            yield f"(~{expression}.isnan()).sum()"
        signs = {"==": ("!=", "=="), ">": (">", "<="), ">=": (">=", "<")}.get(self.sign, ())
        yield from (f"({expression} {sign} {self.value:g}).sum()" for sign in signs)


def _columns(divided: Any) -> Iterator[tuple[Any, ...]]:
    """For each value inside of an argument, all that there is of it."""
    if isinstance(divided, (CutTensor, SameForAll)):
        yield from ((leaf,) for leaf in leaves(divided.value))
    elif isinstance(divided, DividedValue):
        yield from zip(*map(leaves, getattr(divided, "values", ())))
    else:
        for item in children(divided) or ():
            yield from _columns(item)


def is_index(leaf: torch.Tensor) -> bool:
    """Whether a tensor holds integers: class indices, perhaps."""
    whole = not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool
    return whole and leaf.layout is torch.strided
