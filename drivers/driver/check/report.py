"""What the checks of a driver found, in words.

`driver.check` and the check of a first step give a report: print it. Where rows do not agree, the error says which rows, their
losses, and all other differences.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from pippy.drivers.batch.loss_weights import reduction_of
from pippy.drivers.batch.specs import items_with_paths
from pippy.drivers.compare.trial_notes import ComputedChoice
from pippy.drivers.driver.check.comparisons import Compared
from pippy.drivers.driver.check.differences import COMPARED_KINDS, Difference
from pippy.drivers.driver.check.origin import Origin
from pippy.drivers.driver.check.rows import TriedRows, WholeRows
from pippy.drivers.driver.steps.results import model_output
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.ir.base.errors import NameLookupError
from pippy.ir.base.names import LOSS, stage_name
from pippy.ir.base.readable import count_with_noun, listed, shortened, text_table
from pippy.ir.record.compiled import Compiled, is_getitem

_IN_ERRORS = 5  # differences, and sizes of micro-batches

NOT_COMPARED = (
    "the first step was not compared with the plain model, and not compared is not equal: {}. What to do: change what prevents "
    "the comparison; or give the driver check=False, which leaves it out, if you have compared the numbers yourself"
)
NOT_FOLLOWED = (
    "No row was cut, so the stages do not compute what the model computes: tracing has lost something. Keep the part of the "
    "model that makes the difference whole (a tracer whose is_leaf_module says so), or make it a layer of "
    "Pipe.from_sequential, and please report it"
)
ADVICE_FOR_BUFFERS = (
    "Forward changes these buffers by the rows that it is given, so each micro-batch would change them by its own "
    'rows. If this is acceptable, give the driver buffers="per_microbatch". Otherwise change them outside of '
    "forward, or run one micro-batch, chunks=1"
)
UNKNOWN_DRAWS = (
    "pippy cannot find out how the losses of micro-batches add up, because the loss draws random numbers that are "
    "not torch's. If it is a mean over rows, give the driver loss_reduction='mean'; otherwise run one micro-batch, "
    "chunks=1"
)
UNEQUAL_CHOICE = (
    "loss_reduction='mean' was given, but the loss is a mean over what a mask chooses, and in this step it chose unequal "
    "parts of the micro-batches ({counts}), so their losses do not add up to the plain model's:\n  "
    "{where}\nThe step has left no "
    "gradients. Give loss_reduction= a function that returns the weight of a micro-batch, such as lambda "
    "target: (target >= 0).sum(); or "
    "run one micro-batch, chunks=1"
)


def disagreement(compiled: Compiled, placed: PlacedPipe, comparison: Compared, is_cut: bool = True) -> str:
    """The beginning of an error, which is followed by advice."""
    rows = comparison.rows
    text = f"{_rows_of(rows, is_cut)} The numbers differ, so the step would not be the plain model's. "
    kind = _spelled(compiled, comparison)
    if not is_cut:
        text += f"The loss is {comparison.trial.loss:.6g}, and the plain model's {comparison.loss:.6g}. "
    elif "loss" in comparison.kinds:
        parts = listed([f"{loss:.6g}" for loss in comparison.trial.losses[:_IN_ERRORS]])
        more = ", ..." if len(comparison.trial.losses) > _IN_ERRORS else ""
        text += (
            f"The losses of the micro-batches added up as {kind} are not the loss of the whole: they are {parts}{more}, "
            f"together {comparison.trial.loss:.6g}, and the loss of the whole is {comparison.loss:.6g}. "
        )
    else:
        text += f"The losses of the micro-batches add up as {kind}, but these do not: "
    others = [each for each in comparison.differences if each.kind != "loss"]
    return text.rstrip() + f"\n{_lines_of(placed, others)}\n" if others else text


def _lines_of(placed: PlacedPipe, differences: Sequence[Difference]) -> str:
    """The worst differences, a line each."""
    lines = [
        f"  {each.kind} of {_user_name(placed, each)}: off by {each.off:.2g} of its size"
        for each in differences[:_IN_ERRORS]
    ]
    more = len(differences) - _IN_ERRORS
    return "\n".join([*lines, *([f"  and {more} more"] if more > 0 else [])])


def with_stages(placed: PlacedPipe, differences: Sequence[Difference]) -> list[Difference]:
    """The differences with their stages: those that have the parameter or buffer, or that make the output or the loss."""
    return [replace(each, stage=_stage_of(placed, each)) for each in differences]


def _stage_of(placed: PlacedPipe, difference: Difference) -> str:
    compiled, name = placed.compiled, difference.name
    node: Any
    if difference.kind == "loss" and compiled.loss is not None:
        node = next(each for each in compiled.split_gm.graph.nodes if each.name == compiled.loss.value)
    elif difference.kind == "output":
        node = _at(model_output(compiled), name, "output")
    else:
        return _stages_with(placed, name)
    while isinstance(node, fx.Node) and is_getitem(node):
        node = node.args[0]
    is_made = isinstance(node, fx.Node) and node.op == "call_module"
    return stage_of_call(placed, str(node.target)) if is_made else ""


def _at(value: Any, path: str, here: str) -> Any:
    """The item of ``value`` at a path, or the item that contains it."""
    for inner, item in items_with_paths(value, here) or ():
        if path.startswith(inner):
            return _at(item, path, inner)
    return value


def _stages_with(placed: PlacedPipe, name: str) -> str:
    """The stages that hold a parameter or buffer; "" if none does."""
    try:
        calls = [place.call for _, place in placed.locations(name)]
    except NameLookupError:  # a tensor of forward's own
        return ""
    return ", ".join(dict.fromkeys(stage_of_call(placed, call) for call in calls))


def stage_of_call(placed: PlacedPipe, call: str) -> str:
    """The stage of a call: that of the loss is the one that it runs with."""
    return stage_name(placed.loss_stage) if call == LOSS else call


def disagreement_of_step(placed: PlacedPipe, differences: Sequence[Difference], is_of_workers: bool) -> str:
    """The error for a step that was run as a whole. With ``is_of_workers`` only the run on the workers is wrong."""
    said = "the step was run by the plain model and, as a trial, by the workers"
    lines = _lines_of(placed, differences)
    if not is_of_workers:
        return f"{said}:\n{lines}"
    return (
        f"{said}. Numbers differ by more than rounding, though they agree when the same micro-batches are run all forwards "
        f"first:\n{lines}\nThis is a fault of a worker, of what is sent, or of pippy: please report it"
    )


def unknown_choice(chosen: ComputedChoice, may_be_single: bool) -> str:
    """Why the rows that were tried do not show how losses add up, and what to do."""
    if chosen.ranked:
        return (
            "the loss has a mean over rows of what each row chooses, as a loss that balances experts has. All rows that were "
            "tried choose alike, so whether the losses of micro-batches add up when rows do not cannot be seen:\n"
            f"  {chosen.where}\nThe plain model's mean is over all rows: run one micro-batch, chunks=1; or give the driver "
            "loss_reduction='mean', if rows always choose alike, or if the mean may be over each micro-batch"
        )
    return (
        "the loss is a mean over the rows that a mask chooses. The mask chose all rows that were tried, so pippy "
        "cannot see how the losses of micro-batches add up when it leaves rows out:\n"
        f"  {chosen.where}\n"
        "Give loss_reduction= a function that returns the weight of a micro-batch, such as lambda target: (target "
        ">= 0).sum(); or give 'mean' if the mask never leaves rows out"
        + "; or compute the loss once, over all: PipelineDriverFillDrain(pipe, single_loss=True)" * may_be_single
        + "; or run one micro-batch, chunks=1"
    )


def _rows_of(rows: TriedRows, is_cut: bool) -> str:
    """Which rows were run, and how."""
    count, sizes = len(rows.order), list(map(str, rows.sizes))
    mini_batch = isinstance(rows, WholeRows)
    who = f"All {count} rows" if mini_batch else f"{count} of the rows"
    who += f"{_edits_of(rows)} were run as one micro-batch by the plain model"
    slices = rows.mini_batch.slices
    cut = f", each in {slices} slices of its sequences" * (slices > 1)
    if not is_cut:
        return f"{who}, and uncut by the stages."
    if len(sizes) > _IN_ERRORS:
        return f"{who}, and again as {len(sizes)} micro-batches of the pipeline{cut}."
    count_of = "two" if len(sizes) == 2 else str(len(sizes))
    return f"{who}, and again as {count_of} of {listed(sizes)} rows by the pipeline{cut}."


def _edits_of(rows: TriedRows) -> str:
    """The text that says which numbers were put into the rows, as later batches may have them."""
    if rows.edits and not any(edit.values for edit in rows.edits.values()):
        return ", where rows with the same inputs have others, in the opposite order,"
    users = {name: user for user, name in rows.division.names.items()}
    said = [f"{users.get(place[0], place[0])!r} is {_listed(edit.values)}" for place, edit in rows.edits.items()]
    return f", in some of which {' and '.join(said)}," if said else ""


def _spelled(compiled: Compiled, comparison: Compared) -> str:
    if comparison.reduction.single:
        return "one loss over all"
    if callable(comparison.reduction.how):
        return "loss_reduction counts"
    kind = comparison.reduction.how or reduction_of(compiled.loss_module).kind
    return "a sum" if kind == "sum" else "a mean over rows"


def _user_name(placed: PlacedPipe, each: Difference) -> str:
    stage = "" if each.name.startswith(f"{LOSS}.") else _stages_with(placed, each.name)
    return f"{each.name!r} ({stage})" if stage else repr(each.name)


def _listed(values: Sequence[float]) -> str:
    return " or ".join(dict.fromkeys(f"{value:g}" if isinstance(value, float) else str(value) for value in values))


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
    difference, relative to its tensor, and ``rounding`` the largest that other rounding makes in the plain model.
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
                f"largest difference {_number(self.largest)}; rounding alone moves {_number(self.rounding)}"
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
