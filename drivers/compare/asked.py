"""What a model asks of numbers on the way to a mean: which targets count, which tokens are chosen, by what a sum is divided.

While the answer is the same for all rows that were tried, nobody can see what the loss does with the other answer. So each
question is tried with rows that have both answers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

InputTensor = tuple[
    str, int
]  # of a tensor that the user gives: the name of the input, and the number of the tensor in it


@dataclass(frozen=True)
class Question:
    """Whether numbers are ``sign`` (==, >, >= or nan) ``value``: of one tensor of the user, or of all that hold integers.

    ``counted``: a loss of torch asks, which leaves out what is equal, or weighs it by ``weights``.

    >>> Question(">", 0.0).examples()
    (0, 1)
    """

    sign: str
    value: float
    place: InputTensor | None = None
    counted: bool = False
    weights: tuple[float, ...] = ()

    def examples(self) -> tuple[float, ...]:
        """Numbers with each answer; for == the one that is asked for, as others are there."""
        return {
            "==": (self.value,),
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


@dataclass(frozen=True)
class ComputedChoice:
    """How many of ``of`` numbers were chosen by a mask that was computed, on the way to a mean; at which line of the model.

    With ``ranked``, as by argmax, ``count`` of ``of`` rows choose as the first one, and the choices are averaged over rows.
    """

    where: str
    count: float
    of: float
    ranked: bool = False

    @property
    def are_all(self) -> bool:
        return self.count == self.of


@dataclass(frozen=True)
class TrialNotes:
    """What one worker has noted in a trial."""

    questions: tuple[Question, ...] = ()
    chosen: tuple[ComputedChoice, ...] = field(default=())
