"""Whether the losses of micro-batches, weighted as they are, add up to the loss of the mini-batch: what is asked, and said.

A loss that pippy cannot read is checked on the worker that computes it, in the first step. See workers/loss_probe.py.

    LossChecks, on the controller ── LossCheck, with the step ──▶ LossProbe, on the worker
               ▲                                                      │
               └──────────── LossReport, with the result ─────────────┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pippy.drivers.batches.columns import DivisionOfColumns
from pippy.drivers.batches.division import Division
from pippy.drivers.batches.loss_weights import IGNORED
from pippy.drivers.batches.target_questions import Question
from pippy.drivers.errors import MicrobatchError
from pippy.ir import source


@dataclass(frozen=True)
class LossCheck:
    """What ``worker`` is asked to check. ``value`` names the value that the loss is, or lies in, at ``seed``.

    ``kind`` is how the losses are weighted: "mean" over rows, or "sum". ``inputs`` has the user's name for each input of
    the Pipe that the loss is computed from. ``held`` are questions to which its targets have different answers. ``row_sizes``
    are those of the Pipe, of what the loss is computed from. If not ``due``, only these questions ask for the check.
    """

    worker: int
    value: str
    seed: Any
    kind: str
    inputs: Mapping[str, str]
    held: tuple[Question, ...] = ()
    row_sizes: Mapping[str, Any] = field(default_factory=dict)
    due: bool = True

    def for_targets(self, division: Division) -> "LossCheck | None":
        """The check in a step whose targets were loaded: without questions that they do not answer; None if none is left."""
        given = {name: division.arguments[name] for name in self.inputs if name in division.arguments}
        held = tuple(question for question in self.held if question.is_held(given))
        return replace(self, held=held) if held or self.due else None


@dataclass(frozen=True)
class LossReport:
    """What a check found. ``fits``: the parts add up as assumed. If not, ``reduction`` is the one that fits, as it is written.

    ``unseen`` are questions that matter to the loss, and that all targets of the step answer alike. ``possible`` is False if
    nothing could be compared, ``conclusive`` if a later step should be checked too. ``held`` are the questions of the check.
    """

    fits: bool = True
    reduction: str | None = None
    random: bool = False
    possible: bool = True
    conclusive: bool = True
    unseen: tuple[Question, ...] = ()
    seen: str = ""
    held: tuple[Question, ...] = ()


class LossChecks:
    """Remembers what of a driver's loss was checked: the programs, and by what targets may be left out."""

    def __init__(self, function: bool, row_sizes: Mapping[str, Any]) -> None:
        self.function, self.row_sizes = function, row_sizes  # without a function, the model returns its loss
        self.programs: set[int] = set()
        # False until it was seen that the loss counts targets with either answer
        self.watched: dict[Question, bool] = {Question("==", IGNORED): False}
        self.warned = False

    def begin(
        self, program: int, division: Division, worker: int, value: str, seed: Any, kind: str, taken: Sequence[str]
    ) -> LossCheck | None:
        """What to check in the step that begins; None if all was."""
        users = {name: user for user, name in division.names.items()}
        inputs = {name: users.get(name, name) for name in taken if name in division.arguments}
        given = {name: division.arguments[name] for name in inputs}
        unseen = [question for question, seen in self.watched.items() if not seen] if kind == "mean" else []
        loaded = isinstance(division, DivisionOfColumns)  # so that the worker sees which are held
        held = tuple(question for question in unseen if loaded or question.is_held(given))
        if not held and program in self.programs:
            return None
        sizes = {name: self.row_sizes[name] for name in taken if name in self.row_sizes}
        return LossCheck(worker, value, seed, kind, inputs, held, sizes, program not in self.programs)

    def end(self, program: int, check: LossCheck, report: LossReport) -> None:
        """Take in what a worker found. Raises if the loss of the step is wrong."""
        if not report.fits:
            raise MicrobatchError(self._refusal(check, report))
        if report.conclusive:
            self.programs.add(program)
            self.watched.update(dict.fromkeys(report.held, True))
        for question in report.unseen:
            self.watched.setdefault(question, False)
        if not report.possible and not self.warned:
            self.warned = True
            source.warn(
                f"it could not be checked that the losses of the micro-batches add up to the loss of the whole. "
                f"The loss is taken for a {'mean over rows' if check.kind == 'mean' else 'sum'}. If it is, say "
                f"loss_reduction={check.kind!r}; if not, give a function that counts what a micro-batch holds"
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
