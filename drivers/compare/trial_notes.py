"""What a model asks of numbers on the way to a mean: which targets count, which tokens are chosen, by what a sum is divided.

If the answer is the same for all rows of a trial, the trial does not show what the loss does with the other answer. So each
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

    With ``counted``, a loss of torch asks: it leaves out the numbers that are equal, or weighs them by ``weights``.

    >>> Question(">", 0.0).examples()
    (0, 1)
    """

    sign: str
    value: float
    place: InputTensor | None = None
    counted: bool = False
    weights: tuple[float, ...] = ()

    def examples(self) -> tuple[float, ...]:
        """A number for each answer. For == it is ``value`` alone, as the rows have other numbers already."""
        return {
            "==": (self.value,),
            ">": (math.floor(self.value), math.floor(self.value) + 1),
            ">=": (math.ceil(self.value) - 1, math.ceil(self.value)),
            "nan": (math.nan,),
        }[self.sign]

    def counts(self, expression: str) -> Iterator[str]:
        """The Python text that counts the numbers with each answer."""
        if self.sign == "nan":
            yield f"(~{expression}.isnan()).sum()"
        signs = {"==": ("!=", "=="), ">": (">", "<="), ">=": (">=", "<")}.get(self.sign, ())
        yield from (f"({expression} {sign} {self.value:g}).sum()" for sign in signs)


@dataclass(frozen=True)
class ComputedChoice:
    """A mask that the model computes has chosen ``count`` of ``of`` numbers, on the way to a mean, at a line of the model.

    With ``ranked``, as by argmax, ``count`` of ``of`` rows choose what the first row chooses, and a mean is taken over rows.
    """

    where: str
    count: float
    of: float
    ranked: bool = False

    @property
    def are_all(self) -> bool:
        return self.count == self.of

    @property
    def tells_nothing(self) -> bool:
        """Whether all or none were chosen, so that nobody can see how the losses of micro-batches add up."""
        return self.are_all or self.count == 0


@dataclass(frozen=True)
class TrialNotes:
    """What one worker has noted in a trial."""

    questions: tuple[Question, ...] = ()
    chosen: tuple[ComputedChoice, ...] = field(default=())
