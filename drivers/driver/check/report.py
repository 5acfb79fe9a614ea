"""What the checks of a driver found, `driver.check` and the check of a first step: print it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pippy.drivers.driver.check.differences import COMPARED_KINDS, Difference
from pippy.drivers.driver.check.origin import Origin
from pippy.ir.base.readable import count_with_noun, listed, shortened, text_table

_SHOWN = 20
_WORDS = {
    "loss": ("the loss", "losses"),
    "output": ("1 output", "outputs"),
    "gradient": ("1 gradient", "gradients"),
    "buffer": ("1 buffer", "buffers"),
    "parameter": ("1 parameter after an update", "parameters after an update"),
}


@dataclass(frozen=True)
class CheckReport:
    """A training step on the workers beside the plain model: true if all numbers are the same, but for rounding.

    ``differences`` has the tensors that are wrong, the worst first, and ``begins`` the stage where they begin. ``compared`` is
    the number of tensors of each kind that were compared; ``left_out`` has the others, with reasons. ``largest`` is the largest
    difference, relative to its tensor, and ``rounding`` the largest that another order of the rows makes in the plain model.
    ``statistics`` says which running statistics of norms a run changes by micro-batches, and what to do; nothing if none.
    """

    chunks: int
    differences: tuple[Difference, ...]
    begins: Origin | None
    compared: Mapping[str, int]
    largest: float
    rounding: float
    left_out: tuple[str, ...] = ()
    statistics: str = ""

    @property
    def equal(self) -> bool:
        """Whether all tensors that were compared are the same."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        return "\n".join([self._verdict(), *self._table(), *(f"not compared: {each}" for each in self.left_out)])

    def _verdict(self) -> str:
        parts = counted(self.compared)
        chunks = count_with_noun(self.chunks, "micro-batch")
        if self.equal:
            first = f"running statistics will be those of micro-batches: {self.statistics}\nall else is "
            return (
                f"{first * bool(self.statistics)}the same as the plain model, with {chunks}: {parts}\n"
                f"largest difference {_number(self.largest)}; another order of the rows moves {_number(self.rounding)}"
            )
        count = "1 tensor is" if len(self.differences) == 1 else f"{len(self.differences)} tensors are"
        return f"not the same as the plain model, with {chunks}: {count} off, of {parts}"

    def _table(self) -> list[str]:
        if self.equal:
            return []
        rows = [
            [each.kind, shortened(each.name, 60), each.stage, each.why or _number(each.off), _number(each.allowed)]
            for each in self.differences[:_SHOWN]
        ]
        lines = [text_table(["what", "name", "stage", "off by", "allowed"], rows, words=(0, 1, 2))]
        left = len(self.differences) - _SHOWN
        lines += [f"and {left} more"] if left > 0 else []
        return [*lines, f"begins in {self.begins}"] if self.begins is not None else lines


@dataclass(frozen=True)
class Checked:
    """What the check of a step has compared. Print it.

    ``by_model`` says whether the plain model was the witness; else it was the pipeline as one micro-batch. Of the ``rows`` of
    the mini-batch so many were ``tried``, in ``chunks`` micro-batches; if they were ``padded``, also with other numbers in them.
    ``compared`` counts the tensors of each kind, and ``largest`` is the largest difference, relative to its tensor. A check whose
    numbers are not finite is made again.

    >>> print(Checked(True, 64, 64, 4, {"loss": 1, "gradient": 6}, 2e-7, seconds=0.1))
    the first step is the plain model's: 64 of 64 rows in 4 micro-batches: the loss and 6 gradients; largest difference 2.0e-07; 0.10 s
    """  # noqa: E501

    by_model: bool
    rows: int | None
    tried: int | None
    chunks: int
    compared: Mapping[str, int] = field(default_factory=dict)
    largest: float = 0.0
    is_finite: bool = True
    padded: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        who = "the plain model's" if self.by_model else "what the pipeline gives without micro-batches"
        rows = "" if self.rows is None else f"{self.tried} of {self.rows} rows in "
        padded = ", also with other targets" * self.padded
        finite = "" if self.is_finite else "; some numbers are not finite, so the next step is compared, too"
        return (
            f"the first step is {who}: {rows}{count_with_noun(self.chunks, 'micro-batch')}{padded}: {counted(self.compared)}; "
            f"largest difference {self.largest:.1e}{finite}; {self.seconds:.2f} s"
        )


def counted(compared: Mapping[str, int]) -> str:
    """How many tensors of each kind were compared.

    >>> counted({"loss": 1, "gradient": 6})
    'the loss and 6 gradients'
    """
    return listed([_count(kind, compared[kind]) for kind in COMPARED_KINDS if compared.get(kind)])


def _count(kind: str, count: int) -> str:
    one, many = _WORDS[kind]
    return one if count == 1 else f"{count} {many}"


def _number(value: float) -> str:
    return "0" if value == 0 else "infinite" if math.isinf(value) else f"{value:.1e}"
