"""The first step of a driver is compared with the plain model: the user's own, which runs the same mini-batch in this process.

    a few rows        in two uneven micro-batches, cut in two places           ─┐
    with padding      compared alike, if the loss asks of numbers              ─┼─▶ all agree: the step goes on
    with other        compared alike                                           ─┤   else: remedies are tried in the same way
    all rows          in the micro-batches of the step, by its own program     ─┘

Few rows show what a first mini-batch cannot: uneven micro-batches, and padding. All rows are compared within a `Budget`. Where
no process holds the model, the pipeline on a few rows as one micro-batch stands for it. What cannot be compared is refused.
If a loss of torch tells what it counts, micro-batches are weighted by that. The check is made once for each kind of step, and
again when something changes that its result depends on.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.columns import Column
from pippy.drivers.batch.divide_call import failed_guard, guarded_inputs
from pippy.drivers.batch.division import Division
from pippy.drivers.batch.loss_weights import reduction_of
from pippy.drivers.compare.trial_notes import ComputedChoice, Question, TrialNotes
from pippy.drivers.driver.check.comparisons import (
    Budget,
    Comparisons,
    LossReduction,
    RowComparison,
    RunWhole,
    Unlike,
    WholeStep,
)
from pippy.drivers.driver.check.differences import Difference
from pippy.drivers.driver.check.origin import by_place, where_lost
from pippy.drivers.driver.check.remedies import Remedies
from pippy.drivers.driver.check.report import (
    ADVICE_FOR_BUFFERS,
    NOT_COMPARED,
    NOT_FOLLOWED,
    UNEQUAL_CHOICE,
    UNKNOWN_DRAWS,
    Checked,
    disagreement,
    disagreement_of_graphs,
    disagreement_of_workers,
    stages_with,
    unknown_choice,
)
from pippy.drivers.driver.check.rows import NoRows, TriedRows, WholeRows, edited, kinds_of, made_unlike, places_of
from pippy.drivers.driver.check.trial_steps import TrialSteps
from pippy.drivers.driver.check.witness import Witness
from pippy.drivers.driver.steps.prepared_step import StepRequest
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.worker.measure.watch import Watch
from pippy.ir.base.errors import PippyError
from pippy.ir.base.readable import listed
from pippy.ir.base.trees import tensors
from pippy.ir.call.signature import check_guards

_SHOWN = 6  # micro-batches in an error
_OVER_MEMORY = "the plain model would take more than half of the memory that is free in this process"
_log = logging.getLogger(__name__)


@dataclass
class FoundReduction:
    """What a loss of torch counts, as it says itself: by this the losses of micro-batches are weighted."""

    how: Callable[..., Any] | None = None


class FirstStep:
    """Checks the first steps of one driver by one graph of its model. ``reduction`` is the driver's ``loss_reduction``.

    ``fits`` says whether workers may hold so many rows at a time. What is ``found`` of the loss, all graphs share.
    """

    def __init__(
        self,
        trials: TrialSteps,
        witness: Witness | None,
        reduction: str | Callable[..., Any] | None,
        single_loss: bool,
        may_be_single: bool,
        budget: Budget,
        fits: Callable[[Division], bool] = lambda division: True,
        found: FoundReduction | None = None,
    ) -> None:
        self.trials, self.witness, self.budget = trials, witness, budget
        self.reduction, self.single_loss, self.fits = reduction, single_loss, fits
        self.compiled = trials.placed.compiled
        self.comparisons = Comparisons(trials, witness)
        self.remedies = Remedies(self.comparisons, may_be_single)
        self.found = FoundReduction() if found is None else found
        self.checked: Checked | None = None
        self.watches = False  # whether steps note by what masks the loss chooses: it is said to be a mean over rows
        self._kinds: list[tuple[Any, range]] = []  # of steps that were checked, and the numbers of rows between those
        self._awaited: tuple[Question, ...] = ()  # by which a loss of torch may leave targets out that no step has held

    @property
    def how(self) -> str | Callable[..., Any] | None:
        """The reduction of the losses of micro-batches: the one that was given, or that a check has found."""
        return self.found.how if self.found.how is not None else self.reduction

    @property
    def _loss_reduction(self) -> LossReduction:
        return LossReduction(self.how, self.single_loss)

    def check(self, call: StepRequest, run: RunWhole) -> None:
        """Check a step before it runs, if no step of its kind was checked. Raises if its numbers would be wrong, or if they
        cannot be compared. ``run`` runs the step as a trial."""
        division, parts = call.division, call.plan.parts
        kind, rows = self._kind(call), division.rows
        held = self._holds_awaited(division)
        is_known = any(each == kind and (rows is None or rows in known) for each, known in self._kinds)
        if (is_known and not held) or (self.witness is None and not division.is_cut):
            return
        self.trials.hooks, started = call.hooks, time.perf_counter()
        try:
            with ExitStack() as stack:
                if self.witness is not None:
                    stack.enter_context(self.witness.with_numbers_of_workers())
                checked = self._check_parts(call, run) if len(parts) > 1 else self._check(call, run, held)
        finally:
            self.comparisons.forget()
        self.checked = replace(checked, seconds=time.perf_counter() - started)
        if checked.is_finite:
            self._note_kind(kind, rows or 0)
        _log.info("%s", self.checked)

    def _note_kind(self, kind: Any, rows: int) -> None:
        """Note that steps of a kind were checked, with so many rows, and with fewer and more."""
        others = [known for each, known in self._kinds if each == kind]
        least, most = (min([rows, *(known[0] for known in others)]), max([rows, *(known[-1] for known in others)]))
        self._kinds = [each for each in self._kinds if each[0] != kind] + [(kind, range(least, most + 1))]

    def forget(self) -> None:
        """Check the next step again: a worker was replaced, and does not know which buffers change."""
        self._kinds.clear()
        self._awaited = ()
        self.comparisons.follow = frozenset()

    def _holds_awaited(self, division: Division) -> bool:
        """Whether the step has a number that a check waits for: one that the loss leaves out."""
        for question in self._awaited:
            for place, leaf in places_of(division):
                if place == question.place and any(
                    bool((each == question.value).any()) for each in tensors(leaf.held())
                ):
                    return True
        return False

    def _kind(self, call: StepRequest) -> Any:
        """The kind of a step, all that decides whether it may be cut: the modes of modules, the kinds of arguments, the graphs,
        and the number of rows where forward asks for it."""
        division, graphs = call.division, [each.graph for each in call.plan.parts]
        asks = any(each.asks_for_rows for each in graphs)
        rows = [each.number for each in graphs], division.rows if asks else None, self._fails_for_all(division)
        flags = {call: its.training for calls in self.trials.placed.flags().values() for call, its in calls.items()}
        return flags, rows, division.is_cut, {name: kinds_of(value) for name, value in division.arguments.items()}

    # What is compared

    def _check(self, call: StepRequest, run: RunWhole, with_padding: bool) -> Checked:
        division, columns, reasons = call.division, call.columns, []
        sets: Sequence[RowComparison] = ()
        loaded = division
        try:
            loaded = self._loaded(division, columns, run)
            if division.is_cut:
                sets = self._compared_sets(self._rows(loaded), with_padding)
            elif division.sizes is not None and not self.compiled.guards.are_of_rows:
                sets = [self._uncut(TriedRows(loaded))]
        except (Unlike, NoRows) as error:
            reasons.append(str(error))
        whole = None
        needs_all = self._needs_all(call)
        here = self.witness is not None and not loaded.loads
        if here and not sets and division.is_cut and division.sizes is not None:
            try:
                sets = self._compared_sets(WholeRows(loaded), with_padding)
            except Unlike as error:
                reasons.append(str(error))
        if here:
            sets = self._grown(loaded, sets, with_padding)
            try:
                with _rows_decide(call):
                    whole = self._compared_whole(loaded, run, with_padding, bool(sets) and not needs_all)
            except Unlike as error:
                reasons.append(str(error))
        if whole is not None and sets:
            self._compare_unlike(loaded, with_padding)
        if whole is None and (needs_all or not sets):
            raise MicrobatchError(
                NOT_COMPARED.format("; ".join(dict.fromkeys(reasons)) or "no rows fit into the limit of bytes")
            )
        return self._said(loaded, sets, whole)

    def _needs_all(self, call: StepRequest) -> bool:
        """Whether forward may do something else for all rows than for a part of them, however few."""
        return call.plan.is_of_other_rows or self._fails_for_all(call.division)

    def _fails_for_all(self, division: Division) -> bool:
        """Whether all rows as one micro-batch fail a guard on inputs that a part of them does not fail."""
        if not division.is_cut or division.sizes is None or division.loads:
            return False
        return failed_guard(self.compiled, division.uncut()) is not None

    def _check_parts(self, call: StepRequest, run: RunWhole) -> Checked:
        """Compare all rows of a step whose micro-batches go by several graphs."""
        if self.witness is None:
            raise MicrobatchError(NOT_COMPARED.format("no process holds the plain model"))
        if self.budget.is_over_memory(self.comparisons.cost, call.division.rows or 0, self._device):
            raise MicrobatchError(NOT_COMPARED.format(_OVER_MEMORY))
        try:
            whole = self._whole(call.division, run)
        except Unlike as error:
            raise MicrobatchError(NOT_COMPARED.format(error)) from error
        if whole.differences:
            with _rows_decide(call):
                raise MicrobatchError(disagreement_of_graphs(self.trials.placed, whole.differences))
        return self._said(call.division, (), whole)

    def _loaded(self, division: Division, columns: Sequence[Column], run: RunWhole) -> Division:
        """The mini-batch with the values that workers load, which both sides are given: datasets may draw random numbers."""
        if not division.loads:
            return division
        try:
            return self.trials.datasets.loaded_here(division, columns, True)
        except PippyError as error:
            run(division, frozenset(), ())  # raises what a worker says of its dataset, if it has none either
            raise Unlike(f"the rows cannot be loaded: {error}") from error

    def _grown(self, division: Division, sets: Sequence[RowComparison], with_padding: bool) -> Sequence[RowComparison]:
        """Compare more rows, as many as fit into the budget, where all of them would not. What a few rows took says little of
        that: the more rows were compared, the better it is known."""
        while sets and (cost := self.comparisons.cost) is not None:
            fit = self.budget.rows(cost, self._device)
            if fit >= (division.rows or 0) or fit < 2 * cost.rows:
                break
            try:
                rows = TriedRows(division, min(8 * cost.rows, int(fit)))
                self._check_guards([rows.divided(2)])
                if sum(rows.sizes) < 2 * cost.rows or not self.fits(rows.divided(1)):
                    break
                self.comparisons.cost = None
                compared = self._compared(rows, self._loss_reduction)
            except (NoRows, PippyError, Unlike):  # the Pipe was traced for fewer rows, for one
                break
            finally:
                self.comparisons.cost = self.comparisons.cost or cost
            sets = [compared, *sets[1:]] if compared.agrees else self._compared_sets(rows, with_padding)
        return sets

    def _compared_whole(
        self, division: Division, run: RunWhole, with_padding: bool, has_sets: bool
    ) -> WholeStep | None:
        """All rows, by the step's own program. None if they do not fit into the budget, and others were compared."""
        cost = self.comparisons.cost
        if has_sets and cost is not None and self.budget.rows(cost, self._device) < (division.rows or 0):
            return None
        if not has_sets and self.budget.is_over_memory(cost, division.rows or 0, self._device):
            raise Unlike(_OVER_MEMORY)
        whole = self._whole(division, run)
        if not whole.differences:
            return whole
        sets = self._compared_sets(WholeRows(division), with_padding)  # raises, and says what to do
        if self.comparisons.draws(sets[0]):
            return None
        raise MicrobatchError(disagreement_of_workers(self.trials.placed, whole.differences))

    def _compare_unlike(self, division: Division, with_padding: bool) -> None:
        """Compare all rows once more, with other numbers in those that are alike, if the model takes them."""
        rows = made_unlike(WholeRows(division), self.compiled.target_name)
        if rows is None:
            return
        with suppress(Unlike):
            compared = self._compared(rows, self._loss_reduction)
            if compared.right.is_finite and not compared.agrees:
                self._remedy([compared], self._asked(compared), with_padding)

    def _whole(self, division: Division, run: RunWhole) -> WholeStep:
        """All rows, compared again if a buffer may change once in a step."""
        whole = WholeStep.of(self.comparisons, division, run)
        follows = whole.differences and self.trials.buffers
        if follows and self.comparisons.follows_more(whole.differences, whole.trial.places):
            return WholeStep.of(self.comparisons, division, run)
        return whole

    @property
    def _device(self) -> torch.device:
        assert self.witness is not None
        return self.witness.device

    def _said(self, division: Division, sets: Sequence[RowComparison], whole: WholeStep | None) -> Checked:
        """What was compared."""
        rights = [each.right for each in sets] if whole is None else [whole.right]
        numbers = [each.numbers for each in sets] if whole is None else [whole.numbers]
        return Checked(
            by_model=self.witness is not None,
            rows=division.rows,
            tried=division.rows if whole is not None else sum(sets[0].rows.sizes),
            chunks=division.chunks if whole is not None else len(sets[0].rows.sizes),
            compared=Counter(kind for kind, _ in rights[0].plain),
            largest=max(right.largest(its) for right, its in zip(rights, numbers)),
            is_finite=all(each.is_finite for each in [*rights, *(each.right for each in sets)]),
            padded=len(sets) > 1,
        )

    # Sets of rows

    def _compared_sets(self, rows: TriedRows, with_padding: bool) -> list[RowComparison]:
        """The rows as they are, and with other numbers in some of their tensors. Raises an error that advises what to do."""
        sets = [self._compared(rows, self._loss_reduction)]
        asked = self._asked(sets[0])
        for other in edited(sets[0].rows, asked, self.compiled.target_name):
            try:
                compared = self._compared(other, sets[-1].reduction)
            except Unlike:  # the model does not take such targets
                continue
            if compared.right.is_finite:
                sets.append(compared)
        reduction = sets[-1].reduction
        if not all(each.agrees for each in sets) or not self._fit_all(sets, reduction):
            self._remedy(sets, asked, with_padding)
        elif reduction != self._loss_reduction:
            self._adopt(reduction)
        if self.reduction is None and not self.single_loss:
            self._check_choices(sets)
        self.watches |= self.reduction == "mean" and any(_masks(each.asked) for each in sets)
        return sets

    def _compared(self, rows: TriedRows, reduction: LossReduction) -> RowComparison:
        """Compare rows with this reduction, and if they do not agree, with those that losses of torch tell."""
        begun = self.comparisons.begun(rows, reduction)
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
        self.found.how = reduction.how
        self.trials.datasets.weigh_by(reduction.how)

    def _rows(self, division: Division) -> TriedRows:
        """The rows to try: as many as the Pipe was traced for, in two micro-batches."""
        TriedRows(division)  # raises if nothing has rows
        reason = ""
        for count in (None, 4, 3, 2, 2 * max(division.sizes or (1,))):
            rows = TriedRows(division, count)
            try:
                self._check_guards([rows.divided(2), *([rows.divided(1)] if self.witness is None else [])])
            except PippyError as error:
                reason = reason or f"the Pipe was traced for another number of rows: {error}"
                continue
            if self.fits(rows.divided(1)):
                return rows
            reason = (
                reason or f"{sum(rows.sizes)} rows as one micro-batch, and fewer, do not fit into the limit of bytes"
            )
        raise Unlike(reason)

    def _asked(self, comparison: RowComparison) -> TrialNotes:
        """The questions about the rows that the model asks, and the reduction that was given."""
        asked = comparison.asked
        if callable(self.reduction):
            division = comparison.rows.divided(1)
            with Watch(division) as watch:
                self.comparisons.weights(division, LossReduction(self.reduction))
            asked = replace(asked, questions=(*asked.questions, *watch.asked().questions))
        return asked

    def _check_guards(self, divisions: Sequence[Division]) -> None:
        """Raise if the Pipe was not traced for so many rows."""
        for division in divisions if self.compiled.guards.are_of_rows else ():
            names = guarded_inputs(self.compiled, division)
            for chunk in range(division.chunks):
                check_guards(self.compiled, {name: division.take(name, chunk) for name in names})

    def _check_choices(self, sets: Sequence[RowComparison]) -> None:
        """Raise if the loss is a mean over chosen numbers, and all rows of the trials had the same choice."""
        chosen = [each.asked.chosen for each in sets]
        for untried in (each for each in chosen[0] if each.are_all):
            if all(other.tells_nothing for others in chosen for other in others if other.where == untried.where):
                raise MicrobatchError(unknown_choice(untried, self.remedies.may_be_single))

    def check_choices_of(self, answers: Mapping[int, StepResult]) -> None:
        """Raise if, in a step, masks on the way to a mean have chosen other shares of some micro-batches than of others."""
        for answer in answers.values() if self.watches else ():
            shares: dict[str, list[ComputedChoice]] = {}
            for each in _masks(answer.asked):
                shares.setdefault(each.where, []).append(each)
            for where, chosen in shares.items():
                if len({each.count / each.of for each in chosen if each.of}) > 1:
                    counts = listed([f"{each.count:g} of {each.of:g}" for each in chosen[:_SHOWN]])
                    raise MicrobatchError(UNEQUAL_CHOICE.format(counts=counts, where=where))

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
        self._check_followed(wrong.rows)
        said = disagreement(self.compiled, self.trials.placed, wrong)
        if wrong.kinds == {"buffer"}:
            raise MicrobatchError(said + ADVICE_FOR_BUFFERS)
        candidate = self.remedies.reduction(sets, asked)
        if candidate is None and self.comparisons.draws(sets[0]):
            if self.reduction is not None or reduction_of(self.compiled.loss_module).known:
                return
            raise MicrobatchError(UNKNOWN_DRAWS)
        if candidate is not None and candidate.counted and self.reduction is None:
            self._adopt(LossReduction(candidate.how))
            return
        if wrong.rows.edits and not with_padding and self._are_torchs(sets, asked):
            self._awaited = asked.questions
            if not self._holds_awaited(sets[0].rows.mini_batch):
                return
        if candidate is not None and self._fits_all_rows(sets[0].rows, LossReduction(candidate.how)):
            raise MicrobatchError(f"{said}They agree if you give the driver loss_reduction={candidate.text}")
        raise MicrobatchError(said + self.remedies.other_advice([each.rows for each in sets], self._loss_reduction))

    def _fits_all_rows(self, rows: TriedRows, reduction: LossReduction) -> bool:
        """Whether all rows agree with this reduction, as far as they can be compared: a few may by chance."""
        if self.witness is None or isinstance(rows, WholeRows):
            return True
        try:
            return self.comparisons.compared(WholeRows(rows.mini_batch), reduction).agrees
        except Unlike:
            return True

    def _check_followed(self, rows: TriedRows) -> None:
        """Raise if the stages do not compute what the plain model does where rows are not cut, as far as they can."""
        with suppress(Unlike):
            self._uncut(rows)

    def _uncut(self, rows: TriedRows) -> RowComparison:
        """Compare rows that are not cut. Raises if the stages do not compute what the plain model does."""
        try:
            self._check_guards([rows.divided(1)])
        except PippyError:
            rows = rows.alone()
        uncut = self.comparisons.follows(rows)
        if self.witness is not None and uncut.differences and not self.comparisons.draws(uncut):
            said = disagreement(self.compiled, self.trials.placed, uncut, is_cut=False)
            begins = where_lost(self.witness, uncut.rows.divided(1), uncut.right.floor)
            raise MicrobatchError(
                f"{said}It begins in {begins or by_place(self._placed_in_stages(uncut))}. {NOT_FOLLOWED}"
            )
        return uncut

    def _placed_in_stages(self, comparison: RowComparison) -> list[Difference]:
        """The differences, with their stages."""
        placed = self.trials.placed
        return [
            replace(each, stage=stages_with(placed, each.name) if each.name else "") for each in comparison.differences
        ]

    def _are_torchs(self, sets: Sequence[RowComparison], asked: TrialNotes) -> bool:
        """Whether only numbers that losses of torch leave out were put into the rows."""
        others = {each.place for each in asked.questions if not each.counted}
        if self.compiled.target_name is not None and None in others:  # it was tried with the target
            return False
        only = {each.place for each in asked.questions if each.counted} - others
        return {place for each in sets for place in each.rows.edits} <= only


def _masks(asked: TrialNotes) -> list[ComputedChoice]:
    """The choices by masks, on the way to a mean."""
    return [each for each in asked.chosen if not each.ranked]


@contextmanager
def _rows_decide(call: StepRequest) -> Iterator[None]:
    """Have an error say that forward depends on the number of rows, if micro-batches go by graphs for other numbers."""
    try:
        yield
    except MicrobatchError as error:
        if not call.plan.is_of_other_rows:
            raise
        why = next(each.graph.why for each in reversed(call.plan.parts) if each.graph.number)
        raise MicrobatchError(
            f"forward depends on the number of rows ({why}), and micro-batches do not give what the whole mini-batch gives. "
            f"What to do: run one micro-batch, chunks=1\n{error}"
        ) from None
