"""The first step of a driver is compared with the plain model: the user's own, which runs the same mini-batch in this process.

    a few rows        in two uneven micro-batches, cut in two places           ─┐
    with padding      compared alike, if the loss asks of numbers              ─┼─▶ all agree: the step goes on
    with other        compared alike                                           ─┤   else: other reductions are tried alike
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
from pippy.drivers.batch.divide_call import failed_guard, guarded_inputs
from pippy.drivers.batch.division import Division
from pippy.drivers.batch.loss_weights import reduction_of
from pippy.drivers.compare.trial_notes import ComputedChoice, Question, TrialNotes
from pippy.drivers.driver.check.advice import fitting_reduction, other_advice
from pippy.drivers.driver.check.comparisons import Budget, Compared, Comparisons, LossReduction, RunWhole
from pippy.drivers.driver.check.origin import by_place, where_lost
from pippy.drivers.driver.check.report import (
    ADVICE_FOR_BUFFERS,
    NOT_COMPARED,
    NOT_FOLLOWED,
    UNEQUAL_CHOICE,
    UNKNOWN_DRAWS,
    Checked,
    disagreement,
    disagreement_of_step,
    unknown_choice,
    with_stages,
)
from pippy.drivers.driver.check.rows import (
    CannotCompare,
    TriedRows,
    WholeRows,
    edited,
    kinds_of,
    made_unlike,
    places_of,
)
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
        self.reduction, self.single_loss, self.may_be_single, self.fits = reduction, single_loss, may_be_single, fits
        self.compiled = trials.placed.compiled
        self.comparisons = Comparisons(trials, witness)
        self.found = FoundReduction() if found is None else found
        self.checked: Checked | None = None
        self.watches = False  # whether steps note by what masks the loss chooses: it is said to be a mean over rows
        self._kinds: list[tuple[Any, range]] = []  # of steps that were checked, and the numbers of rows between those
        self._awaited: tuple[Question, ...] = ()  # by which a loss of torch may leave targets out that no step has held
        self._is_held = False  # whether the step that is checked has such targets

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
        division = call.division
        kind, rows = self._kind(call), division.rows
        self._is_held = self._holds_awaited(division)
        is_known = any(each == kind and (rows is None or rows in known) for each, known in self._kinds)
        if (is_known and not self._is_held) or (self.witness is None and not division.is_cut):
            return
        self.trials.hooks, started = call.hooks, time.perf_counter()
        try:
            with ExitStack() as stack:
                if self.witness is not None:
                    stack.enter_context(self.witness.with_numbers_of_workers())
                checked = self._check(call, run)
        finally:
            self.comparisons.forget()
        self.checked = replace(checked, seconds=time.perf_counter() - started)
        if checked.is_finite:
            self._note_kind(kind, rows or 0)
        _log.info("%s", self.checked)

    def _note_kind(self, kind: Any, rows: int) -> None:
        """Note that steps of a kind were checked, with so many rows, and with fewer and more."""
        known = [own for each, own in self._kinds if each == kind]
        least, most = (min([rows, *(each[0] for each in known)]), max([rows, *(each[-1] for each in known)]))
        self._kinds = [each for each in self._kinds if each[0] != kind] + [(kind, range(least, most + 1))]

    def forget(self) -> None:
        """Check the next step again: a worker was replaced, and does not know which buffers change."""
        self._kinds.clear()
        self._awaited = ()
        self.comparisons.follow = frozenset()

    def _holds_awaited(self, division: Division) -> bool:
        """Whether the step has a number that a check waits for: one that the loss leaves out."""
        wanted = {(each.place, each.value) for each in self._awaited}
        return any(
            bool((tensor == value).any())
            for place, leaf in (places_of(division) if wanted else ())
            for awaited, value in wanted
            for tensor in (tensors(leaf.held()) if awaited == place else ())
        )

    def _kind(self, call: StepRequest) -> Any:
        """The kind of a step, all that decides whether it may be cut: the modes of modules, the kinds of arguments, the graphs,
        and the number of rows where forward asks for it."""
        division, graphs = call.division, [each.graph for each in call.plan.parts]
        asks = any(each.asks_for_rows for each in graphs)
        rows = [each.number for each in graphs], division.rows if asks else None, self._fails_for_all(division)
        flags = {call: its.training for calls in self.trials.placed.flags().values() for call, its in calls.items()}
        return flags, rows, division.is_cut, {name: kinds_of(value) for name, value in division.arguments.items()}

    def _fails_for_all(self, division: Division) -> bool:
        """Whether all rows as one micro-batch fail a guard on inputs that a part of them does not fail."""
        if not division.is_cut or division.sizes is None or division.loads:
            return False
        return failed_guard(self.compiled, division.uncut()) is not None

    # What is compared: a few rows, more of them if all do not fit into the budget, and else all

    def _check(self, call: StepRequest, run: RunWhole) -> Checked:
        division, reasons = call.division, list[str]()
        sets: list[Compared] = []
        whole = None
        several = len(call.plan.parts) > 1  # graphs, by which micro-batches go: no few rows go by all of them
        with _noting(reasons):
            division = self._loaded(call, run)
            sets = [] if several else self._few_rows(division, reasons)
        needs_all = several or call.plan.is_of_other_rows or self._fails_for_all(call.division)
        with _noting(reasons), _rows_decide(call):
            if division.loads or self.witness is None:
                raise CannotCompare("no process holds the plain model")
            sets = self._grown(division, sets)
            whole = self._whole(call, division, run, bool(sets) and not needs_all)
        if whole is None and (needs_all or not sets):
            said = "; ".join(dict.fromkeys(reasons)) or "no rows fit into the limit of bytes"
            raise MicrobatchError(NOT_COMPARED.format(said))
        if whole is not None and sets:
            self._compare_unlike(division)
        return self._said(division, sets, whole)

    def _loaded(self, call: StepRequest, run: RunWhole) -> Division:
        """The mini-batch with the values that workers load, which both sides are given: datasets may draw random numbers."""
        division = call.division
        if not division.loads:
            return division
        try:
            return self.trials.datasets.loaded_here(division, call.columns, True)
        except PippyError as error:
            run(division, frozenset(), ())  # raises what a worker says of its dataset, if it has none either
            raise CannotCompare(f"the rows cannot be loaded: {error}") from error

    def _few_rows(self, division: Division, reasons: list[str]) -> list[Compared]:
        """A few rows; if there is no such part of the mini-batch that can be computed, all of them in its micro-batches."""
        if not division.is_cut:
            is_free = division.sizes is not None and not self.compiled.guards.are_of_rows
            return [self._uncut(TriedRows(division))] if is_free else []
        with _noting(reasons):
            return self._sets(self._rows(division))
        is_whole = self.witness is not None and division.sizes is not None
        return self._sets(WholeRows(division)) if is_whole else []

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
            said = f"{sum(rows.sizes)} rows as one micro-batch, and fewer, do not fit into the limit of bytes"
            reason = reason or said
        raise CannotCompare(reason)

    def _check_guards(self, divisions: Sequence[Division]) -> None:
        """Raise if the Pipe was not traced for so many rows."""
        for division in divisions if self.compiled.guards.are_of_rows else ():
            names = guarded_inputs(self.compiled, division)
            for chunk in range(division.chunks):
                check_guards(self.compiled, {name: division.take(name, chunk) for name in names})

    def _grown(self, division: Division, sets: list[Compared]) -> list[Compared]:
        """Compare more rows, as many as fit into the budget, where all of them would not. What a few rows took says little of
        that: the more rows were compared, the better it is known."""
        while sets and (rows := self._more_rows(division)) is not None:
            before, self.comparisons.cost = self.comparisons.cost, None
            try:
                more = self.comparisons.cuts(rows, self._loss_reduction)
            except CannotCompare:
                break
            finally:
                self.comparisons.cost = self.comparisons.cost or before
            sets = self._sets(rows) if any(each.differences for each in more) else [*more, *sets]
        return sets

    def _more_rows(self, division: Division) -> TriedRows | None:
        """More rows than were compared, but not all; None if so many do not fit, or all of them do."""
        cost = self.comparisons.cost
        fit = 0.0 if cost is None else self.budget.rows(cost, self._device)
        if cost is None or fit >= (division.rows or 0) or fit < 2 * cost.rows:
            return None
        try:
            rows = TriedRows(division, min(8 * cost.rows, int(fit)))
            self._check_guards([rows.divided(2)])
            return rows if sum(rows.sizes) >= 2 * cost.rows and self.fits(rows.divided(1)) else None
        except (CannotCompare, PippyError):  # the Pipe was traced for fewer rows, for one
            return None

    def _whole(self, call: StepRequest, division: Division, run: RunWhole, may_be_left_out: bool) -> Compared | None:
        """All rows, by the step's own program. None if they do not fit into the budget, and may be left out."""
        cost, rows = self.comparisons.cost, division.rows or 0
        if may_be_left_out and cost is not None and self.budget.rows(cost, self._device) < rows:
            return None
        if not may_be_left_out and self.budget.is_over_memory(cost, rows, self._device):
            raise CannotCompare(_OVER_MEMORY)
        whole = self.comparisons.whole(division, run, self._loss_reduction)
        if not whole.differences:
            return whole
        if len(call.plan.parts) > 1:
            raise MicrobatchError(disagreement_of_step(self.trials.placed, whole.differences, False))
        sets = self._sets(WholeRows(division))  # raises, and says what to do
        if self.comparisons.draws(sets[0]):
            return None
        raise MicrobatchError(disagreement_of_step(self.trials.placed, whole.differences, True))

    def _compare_unlike(self, division: Division) -> None:
        """Compare all rows once more, with other numbers in those that are alike, if the model takes them."""
        rows = made_unlike(WholeRows(division), self.compiled.target_name)
        with suppress(CannotCompare):
            compared = [] if rows is None else self.comparisons.cuts(rows, self._loss_reduction)
            if rows is not None and compared[0].right.is_finite and any(each.differences for each in compared):
                self._remedy([rows], compared, self._asked(compared[0]))

    @property
    def _device(self) -> torch.device:
        assert self.witness is not None
        return self.witness.device

    def _said(self, division: Division, sets: Sequence[Compared], whole: Compared | None) -> Checked:
        """What was compared."""
        shown = sets if whole is None else [whole]
        return Checked(
            by_model=self.witness is not None,
            rows=division.rows,
            tried=division.rows if whole is not None else sum(sets[0].rows.sizes),
            chunks=division.chunks if whole is not None else len(sets[0].rows.sizes),
            compared=Counter(kind for kind, _ in shown[0].right.plain),
            largest=max(each.right.largest(each.numbers) for each in shown),
            is_finite=all(each.right.is_finite for each in [*shown, *sets]),
            padded=any(each.rows.edits for each in sets),
        )

    # Sets of rows, and what follows if they do not agree

    def _sets(self, rows: TriedRows) -> list[Compared]:
        """Compare the rows as they are, and with other numbers in some of their tensors. Raises an error that advises what to
        do if they do not agree."""
        every = [rows]
        sets = self.comparisons.cuts(rows, self._loss_reduction)
        asked = self._asked(sets[0])
        for other in edited(sets[0].rows, asked, self.compiled.target_name):
            with suppress(CannotCompare):  # the model does not take such targets
                more = self.comparisons.cuts(other, self._loss_reduction)
                if more[0].right.is_finite:
                    every, sets = [*every, other], [*sets, *more]
        if any(each.differences for each in sets):
            self._remedy(every, sets, asked)
            sets = [each for rows in every for each in self.comparisons.cuts(rows, self._loss_reduction)]
        if self.reduction is None and not self.single_loss:
            self._check_choices(sets)
        self.watches |= self.reduction == "mean" and any(_masks(each.found.asked) for each in sets)
        return sets

    def _asked(self, compared: Compared) -> TrialNotes:
        """The questions about the rows that the model asks, and the reduction that was given."""
        asked = compared.found.asked
        if callable(self.reduction):
            division = compared.rows.divided(1)
            with Watch(division) as watch:
                self.comparisons.weights(division, LossReduction(self.reduction))
            asked = replace(asked, questions=(*asked.questions, *watch.asked().questions))
        return asked

    def _check_choices(self, sets: Sequence[Compared]) -> None:
        """Raise if the loss is a mean over chosen numbers, and all rows of the trials had the same choice."""
        chosen = [each.found.asked.chosen for each in sets]
        for untried in (each for each in chosen[0] if each.are_all):
            if all(other.tells_nothing for others in chosen for other in others if other.where == untried.where):
                raise MicrobatchError(unknown_choice(untried, self.may_be_single))

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

    def _remedy(self, every: Sequence[TriedRows], sets: Sequence[Compared], asked: TrialNotes) -> None:
        """Find the reduction of the losses. Raises an error that advises it, unless a loss of torch tells the reduction.

        The numbers that a loss of torch leaves out may never come. If only they are wrong, the check waits for them.
        """
        wrong = next(each for each in sets if each.differences)
        candidate = fitting_reduction(self.comparisons, every, sets, asked)
        if candidate is not None and candidate.counted and self.reduction is None and not self.single_loss:
            assert callable(candidate.how)
            self.found.how = candidate.how
            self.trials.datasets.weigh_by(candidate.how)
            return
        with suppress(CannotCompare):
            self._uncut(wrong.rows)  # raises if the stages do not compute what the plain model does
        said = disagreement(self.compiled, self.trials.placed, wrong)
        if wrong.kinds == {"buffer"}:
            raise MicrobatchError(said + ADVICE_FOR_BUFFERS)
        if candidate is None and self.comparisons.draws(sets[0]):
            if self.reduction is not None or reduction_of(self.compiled.loss_module).known:
                return
            raise MicrobatchError(UNKNOWN_DRAWS)
        if wrong.rows.edits and not self._is_held and self._are_torchs(every, asked):
            self._awaited = asked.questions
            if not self._holds_awaited(every[0].mini_batch):
                return
        if candidate is not None and self._fits_all_rows(every[0], LossReduction(candidate.how)):
            raise MicrobatchError(f"{said}They agree if you give the driver loss_reduction={candidate.text}")
        given = self.comparisons, every, self._loss_reduction, self.may_be_single
        raise MicrobatchError(said + other_advice(*given))

    def _fits_all_rows(self, rows: TriedRows, reduction: LossReduction) -> bool:
        """Whether all rows agree with this reduction, as far as they can be compared: a few may by chance."""
        if self.witness is None or isinstance(rows, WholeRows):
            return True
        try:
            return not any(each.differences for each in self.comparisons.cuts(WholeRows(rows.mini_batch), reduction))
        except CannotCompare:
            return True

    def _are_torchs(self, every: Sequence[TriedRows], asked: TrialNotes) -> bool:
        """Whether only numbers that losses of torch leave out were put into the rows."""
        others = {each.place for each in asked.questions if not each.counted}
        if self.compiled.target_name is not None and None in others:  # it was tried with the target
            return False
        only = {each.place for each in asked.questions if each.counted} - others
        return {place for each in every for place in each.edits} <= only

    def _uncut(self, rows: TriedRows) -> Compared:
        """Compare rows that are not cut. Raises if the stages do not compute what the plain model does."""
        try:
            self._check_guards([rows.divided(1)])
        except PippyError:
            rows = rows.alone()
        uncut = self.comparisons.of_rows(rows, LossReduction(None), chunks=1)
        if self.witness is not None and uncut.differences and not self.comparisons.draws(uncut):
            said = disagreement(self.compiled, self.trials.placed, uncut, is_cut=False)
            begins = where_lost(self.witness, uncut.rows.divided(1), uncut.right.floor)
            raise MicrobatchError(
                f"{said}It begins in {begins or by_place(with_stages(self.trials.placed, uncut.differences))}. {NOT_FOLLOWED}"
            )
        return uncut


@contextmanager
def _noting(reasons: list[str]) -> Iterator[None]:
    """Inside, what cannot be compared is noted."""
    try:
        yield
    except CannotCompare as error:
        reasons.append(str(error))


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
