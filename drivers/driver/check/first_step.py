"""The first step of a driver checks itself: a few rows as one micro-batch and as two must give the same numbers.

    the rows as they are     compared, cut in two places ─┐
    with padding             compared, cut in two places ─┼─▶ all agree: the step goes on
    with other padding       compared, cut in two places ─┘   else: remedies are tried in the same way

Where sequences are cut into slices, the two micro-batches of rows are, and the one is not.
The loss, every gradient and every buffer are compared, of all stages; see comparisons.py and worker/trials.py. So any loss is
checked, in whichever stages its parts are made. If a loss of torch tells what it counts, micro-batches are weighted by that.
The check is made once, and again when something changes that its result depends on.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.columns import Column, DivisionOfColumns
from pippy.drivers.batch.divide_call import guarded_inputs
from pippy.drivers.batch.division import DividedValue, Division, divided_leaves
from pippy.drivers.batch.loss_weights import reduction_of
from pippy.drivers.compare.trial_notes import ComputedChoice, Question, TrialNotes
from pippy.drivers.driver.check.comparisons import Comparisons, LossReduction, NotFinite, RowComparison, Unlike
from pippy.drivers.driver.check.disagreement import disagreement
from pippy.drivers.driver.check.edits import edited
from pippy.drivers.driver.check.remedies import Remedies
from pippy.drivers.driver.check.rows import NoRows, TriedRows, places_of
from pippy.drivers.driver.check.trial_steps import TrialSteps
from pippy.drivers.worker.measure.watch import Watch
from pippy.ir.base.errors import PippyError
from pippy.ir.base.trees import leaves, tensors
from pippy.ir.call.signature import check_guards

_LOOKED_AT = 5  # leaves of an argument, to know its kind


@dataclass(frozen=True)
class Unchecked:
    """A kind of step that could not be checked, and the reason. With ``again``, the next step of this kind is checked."""

    kind: Any
    reason: str
    again: bool = False


class FirstStep:
    """Checks the first steps of one driver. ``reduction`` is the driver's ``loss_reduction``.

    ``fits`` says whether workers may hold so many rows at a time.
    """

    def __init__(
        self,
        trials: TrialSteps,
        reduction: str | Callable[..., Any] | None,
        single_loss: bool,
        may_be_single: bool,
        fits: Callable[[Division], bool] = lambda division: True,
    ) -> None:
        self.trials, self.reduction, self.single_loss, self.fits = trials, reduction, single_loss, fits
        self.compiled = trials.placed.compiled
        self.comparisons = Comparisons(trials)
        self.remedies = Remedies(self.comparisons, may_be_single)
        self.told_reduction: Callable[..., Any] | None = None  # what a loss of torch counts, as it says itself
        self._checked: list[Any] = []
        self._not_finite: list[Any] = []  # kinds of which it was said that they could not be checked yet
        self._awaited: tuple[Question, ...] = ()  # by which a loss of torch may leave targets out that no step has held

    @property
    def how(self) -> str | Callable[..., Any] | None:
        """The reduction of the losses of micro-batches: the one that was given, or that a check has found."""
        return self.told_reduction if self.told_reduction is not None else self.reduction

    @property
    def _loss_reduction(self) -> LossReduction:
        return LossReduction(self.how, self.single_loss)

    def check(self, division: Division, columns: Sequence[Column]) -> "Unchecked | None":
        """Check a step before it runs, if no step of its kind was checked. Raises if its numbers would be wrong.

        If nothing could be compared, returns the reason, once for each kind of step.
        """
        kind = self._kind(division)
        held = self._holds_awaited(division)
        if not division.is_cut or (kind in self._checked and not held):
            return None
        unchecked = None
        try:
            self._check(division, columns, held)
            self._checked.append(kind)
        except NotFinite as error:
            if kind not in self._not_finite:
                unchecked = Unchecked(kind, f"{error}; later steps are tried", again=True)
        except (Unlike, NoRows) as error:
            unchecked = Unchecked(kind, str(error))
        except MicrobatchError:
            self.trials.forget()
            raise
        self.trials.forget()
        return unchecked

    def _holds_awaited(self, division: Division) -> bool:
        """Whether the step has a number that a check waits for: one that the loss leaves out."""
        for question in self._awaited:
            for place, leaf in places_of(division):
                if place == question.place and any(
                    bool((each == question.value).any()) for each in tensors(leaf.held())
                ):
                    return True
        return False

    def forget(self) -> None:
        """Check the next step again: a worker was replaced, and does not know which buffers change."""
        self._checked.clear()
        self._awaited = ()

    def note(self, unchecked: "Unchecked") -> None:
        """Note that the user was told that this kind of step could not be checked: the warning is not repeated."""
        (self._not_finite if unchecked.again else self._checked).append(unchecked.kind)

    def _kind(self, division: Division) -> Any:
        """The kind of a step, all that decides whether it may be cut: the modes of modules, and the kinds of arguments."""
        flags = {call: its.training for calls in self.trials.placed.flags().values() for call, its in calls.items()}
        return flags, {name: _kinds(value) for name, value in division.arguments.items()}

    def _check(self, division: Division, columns: Sequence[Column], with_padding: bool = False) -> None:
        rows = self._rows(division, columns)
        sets = [self._compared(rows, self._loss_reduction)]
        asked = self._asked(sets[0])
        for other in edited(sets[0].rows, asked, self.compiled.target_name):
            try:
                sets.append(self._compared(other, sets[-1].reduction))
            except Unlike:  # the model does not take such targets
                continue
        reduction = sets[-1].reduction
        if not all(each.agrees for each in sets) or not self._fit_all(sets, reduction):
            self._remedy(sets, asked, with_padding)
        elif reduction != self._loss_reduction:
            self._adopt(reduction)
        if self.reduction is None and not self.single_loss:
            self._check_choices(sets)

    def _compared(self, rows: TriedRows, reduction: LossReduction) -> RowComparison:
        """Compare rows with this reduction, and if they do not agree, with those that losses of torch tell."""
        begun = self.comparisons.begun(rows, reduction, watch=True)
        if not begun.agrees and self.reduction is None and not self.single_loss:
            for other in self.remedies.counts(begun):
                comparison = self.comparisons.cut_elsewhere(self.comparisons.by(begun, other))
                if comparison.agrees:
                    return comparison
        return self.comparisons.cut_elsewhere(self.comparisons.measured(begun))

    def _fit_all(self, sets: Sequence[RowComparison], reduction: LossReduction) -> bool:
        """Whether all sets of rows agree with this reduction. A set is compared again if its weights are others."""
        weights = self.comparisons.weights
        unlike = [
            comparison.rows
            for comparison in sets
            if any(weights(each.rows.divided(2), reduction) != each.parts.weights for each in comparison.both())
        ]
        return self.comparisons.fit(unlike, reduction)

    def _adopt(self, reduction: LossReduction) -> None:
        """Use the reduction that a loss of torch tells."""
        assert callable(reduction.how)
        self.told_reduction = reduction.how
        self.trials.datasets.weigh_by(reduction.how)

    def _rows(self, division: Division, columns: Sequence[Column]) -> TriedRows:
        """The rows to try: as many as the Pipe was traced for."""
        rows = TriedRows(division)
        if isinstance(division, DivisionOfColumns):
            try:
                division = self.trials.datasets.loaded_here(rows.divided(2), columns, True)
            except PippyError as error:
                raise Unlike(f"the rows cannot be loaded: {error}") from error
        reason = ""
        for count in (None, 4, 3, 2, 2 * max(division.sizes or (1,))):
            rows = TriedRows(division, count)
            try:
                self._check_guards(rows)
            except PippyError as error:
                reason = reason or f"the Pipe was traced for another number of rows: {error}"
                continue
            if self.fits(rows.divided(1)):
                return rows
            reason = reason or f"{sum(rows.sizes)} rows as one micro-batch, and fewer, do not fit into memory="
        raise Unlike(reason)

    def _asked(self, comparison: RowComparison) -> TrialNotes:
        """The questions about the rows that the model asks, and the reduction that was given."""
        asked = comparison.whole.asked
        if callable(self.reduction):
            division = comparison.rows.divided(1)
            with Watch(division) as watch:
                self.comparisons.weights(division, LossReduction(self.reduction))
            asked = replace(asked, questions=(*asked.questions, *watch.asked().questions))
        return asked

    def _check_guards(self, rows: TriedRows) -> None:
        """Raise if the Pipe was not traced for so many rows."""
        for division in (rows.divided(1), rows.divided(2)) if self.compiled.guards.are_of_rows else ():
            names = guarded_inputs(self.compiled, division)
            for chunk in range(division.chunks):
                check_guards(self.compiled, {name: division.take(name, chunk) for name in names})

    def _check_choices(self, sets: Sequence[RowComparison]) -> None:
        """Raise if the loss is a mean over chosen numbers, and all rows of the trials had the same choice."""
        chosen = [each.whole.asked.chosen for each in sets]
        for untried in (each for each in chosen[0] if each.are_all):
            if all(other.are_all for others in chosen for other in others if other.where == untried.where):
                raise MicrobatchError(_unknown_choice(untried))

    def _remedy(self, sets: Sequence[RowComparison], asked: TrialNotes, with_padding: bool) -> None:
        """Find the reduction of the losses. Raises an error that advises it, unless a loss of torch tells the reduction.

        The numbers that a loss of torch leaves out may never come. If only they are wrong, the check waits for them.
        """
        sets = [
            each
            if each.reduction == self._loss_reduction
            else self.comparisons.compared(each.rows, self._loss_reduction)
            for each in sets
        ]
        wrong = next((cut for each in sets if (cut := each.wrong) is not None), None)
        if wrong is None:
            return
        said = disagreement(self.compiled, wrong)
        if not wrong.loss_differs and all(each.kind == "buffer" for each in wrong.differences):
            raise MicrobatchError(said + _ADVICE_FOR_BUFFERS)
        candidate = self.remedies.reduction(sets, asked)
        if candidate is None and self.comparisons.draws(sets[0]):
            if self.reduction is not None or reduction_of(self.compiled.loss_module).known:
                return
            raise MicrobatchError(_UNKNOWN_DRAWS)
        if candidate is not None and candidate.counted and self.reduction is None:
            self._adopt(LossReduction(candidate.how))
            return
        if wrong.rows.edits and not with_padding and self._are_torchs(sets, asked):
            self._awaited = asked.questions
            if not self._holds_awaited(sets[0].rows.mini_batch):
                return
        if candidate is not None:
            raise MicrobatchError(f"{said}They agree if you give the driver loss_reduction={candidate.text}")
        raise MicrobatchError(said + self.remedies.other_advice([each.rows for each in sets], self._loss_reduction))

    def _are_torchs(self, sets: Sequence[RowComparison], asked: TrialNotes) -> bool:
        """Whether only numbers that losses of torch leave out were put into the rows."""
        others = {each.place for each in asked.questions if not each.counted}
        if self.compiled.target_name is not None and None in others:  # it was tried with the target
            return False
        only = {each.place for each in asked.questions if each.counted} - others
        return {place for each in sets for place in each.rows.edits} <= only


_ADVICE_FOR_BUFFERS = (
    "Forward changes these buffers by the rows that it is given, so each micro-batch would change them by its own "
    'rows. If this is acceptable, give the driver buffers="per_microbatch". Otherwise change them outside of '
    "forward, or run one micro-batch, chunks=1"
)
_UNKNOWN_DRAWS = (
    "pippy cannot find out how the losses of micro-batches add up, because the loss draws random numbers that are "
    "not torch's. If it is a mean over rows, give the driver loss_reduction='mean'; otherwise run one micro-batch, "
    "chunks=1"
)


def _unknown_choice(chosen: ComputedChoice) -> str:
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
    )


def _kinds(value: Any) -> Any:
    """The kind of an argument, all that decides how it is cut: classes, dtypes, dimensions, and values that are no tensors."""
    return tuple(_kind_of_leaf(leaf) for leaf in divided_leaves(value))


def _kind_of_leaf(leaf: DividedValue) -> Any:
    its = itertools.islice(leaves(leaf.held()), _LOOKED_AT)
    kinds = [(each.dtype, each.dim()) if isinstance(each, torch.Tensor) else _constant(each) for each in its]
    return type(leaf), getattr(leaf, "dim", None), tuple(kinds)


def _constant(value: Any) -> Any:
    return value if isinstance(value, (bool, str, int)) else type(value)
