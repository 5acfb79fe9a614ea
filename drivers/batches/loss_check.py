"""Whether the losses of micro-batches, weighted as they are, add up to the loss of the mini-batch: what is asked, and said.

A loss that pippy cannot read is checked on the worker that computes it, in the first step. See workers/loss_probe.py.

    LossChecks, on the controller ── LossCheck, with the step ──▶ LossProbe, on the worker
               ▲                                                      │
               └──────────── LossReport, with the result ─────────────┘
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.batches.division import CutTensor, DividedValue, Division
from pippy.drivers.batches.loss_weights import IGNORED
from pippy.drivers.errors import MicrobatchError
from pippy.ir.errors import PippyWarning
from pippy.ir.trees import children, tensors


@dataclass(frozen=True)
class LossCheck:
    """What ``worker`` is asked to check. ``value`` names the value that the loss is, or lies in, at ``seed``.

    ``kind`` is how the losses are weighted: "mean" over rows, or "sum". ``inputs`` has the user's name for each input of
    the Pipe that the loss is computed from. ``held`` are values that the targets hold and the loss may leave out.
    """

    worker: int
    value: str
    seed: Any
    kind: str
    inputs: Mapping[str, str]
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class LossReport:
    """What a check found. ``fits``: the parts add up as assumed. If not, ``reduction`` is the one that fits, as it is written.

    ``ignored`` are the ``ignore_index`` of the cross entropies that the loss calls. ``possible`` is False if nothing could
    be compared, ``conclusive`` if a later step should be checked too.
    """

    fits: bool = True
    reduction: str | None = None
    random: bool = False
    possible: bool = True
    conclusive: bool = True
    ignored: tuple[int, ...] = ()
    seen: str = ""


class LossChecks:
    """Remembers what of a driver's loss was checked: the programs, and the values that targets may be left out for."""

    def __init__(self, function: bool) -> None:
        self.function = function  # a loss function; otherwise the model returns its loss
        self.programs: set[int] = set()
        self.watched: dict[int, bool] = {
            IGNORED: False
        }  # False until it was seen that the loss counts targets of this value
        self.warned = False

    def begin(
        self, program: int, division: Division, worker: int, value: str, seed: Any, kind: str, taken: Sequence[str]
    ) -> LossCheck | None:
        """What to check in the step that begins; None if all was."""
        users = {name: user for user, name in division.names.items()}
        inputs = {name: users.get(name, name) for name in taken if name in division.arguments}
        held = tuple(self._held(division, inputs)) if kind == "mean" else ()
        return LossCheck(worker, value, seed, kind, inputs, held) if held or program not in self.programs else None

    def _held(self, division: Division, inputs: Mapping[str, str]) -> Iterator[int]:
        for value in [value for value, done in self.watched.items() if not done]:
            if any(bool((each == value).any()) for name in inputs for each in indices(division.arguments[name])):
                yield value

    def end(self, program: int, check: LossCheck, report: LossReport) -> None:
        """Take in what a worker found. Raises if the loss of the step is wrong."""
        if not report.fits:
            raise MicrobatchError(self._refusal(check, report))
        if report.conclusive:
            self.programs.add(program)
            self.watched.update(dict.fromkeys(check.held, True))
        for value in report.ignored:
            self.watched.setdefault(value, False)
        if not report.possible and not self.warned:
            self.warned = True
            warnings.warn(
                f"it could not be checked that the losses of the micro-batches add up to the loss of the whole. "
                f"The loss is taken for a {'mean over rows' if check.kind == 'mean' else 'sum'}. If it is, say "
                f"loss_reduction={check.kind!r}; if not, give a function that counts what a micro-batch holds",
                PippyWarning,
                stacklevel=6,
            )

    def _refusal(self, check: LossCheck, report: LossReport) -> str:
        if report.random:
            return (
                "the loss draws random numbers, so its parts cannot be compared with the whole, to see how they add up. "
                f"Give the driver loss_reduction={check.kind!r} if it is a {_spelled(check.kind)}, or run one "
                "micro-batch, chunks=1"
            )
        kind = _spelled(check.kind)
        text = f"the losses of the micro-batches do not add up to the loss of the whole as a {kind}: {report.seen}. "
        if report.reduction is not None:
            return f"{text}They do if you give the driver loss_reduction={report.reduction}"
        single = ", or compute the loss once, over all: PipelineDriverFillDrain(pipe, single_loss=True)"
        return (
            f"{text}No other known reduction fits either. Run one micro-batch, chunks=1{single if self.function else ''}. "
            "If you know how its parts add up, give the driver loss_reduction: 'mean', 'sum', or a function that counts what a "
            "micro-batch holds"
        )


def _spelled(kind: str) -> str:
    return "sum" if kind == "sum" else "mean over rows"


def indices(divided: Any) -> Iterator[torch.Tensor]:
    """The tensors of integers in a divided value: class indices, perhaps."""
    if isinstance(divided, DividedValue):
        values = getattr(divided, "values", None) or (getattr(divided, "value", None),)
        found: Iterator[torch.Tensor] = tensors(values) if not isinstance(divided, CutTensor) else iter([divided.value])
        yield from (
            each
            for each in found
            if each.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
            and each.layout is torch.strided
        )
    else:
        for item in children(divided) or ():
            yield from indices(item)
