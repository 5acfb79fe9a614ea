"""The first step of a driver checks itself: a few rows as one micro-batch and as two must give the same numbers.

    the rows as they are     reference · noise · two micro-batches · two others ─┐
    with padding             reference · noise · two micro-batches              ─┼─▶ all agree: the step goes on
    with other padding       reference · noise · two micro-batches              ─┘   else: remedies are tried in the same way

Loss, every gradient and every buffer are compared, of all stages; see worker/trials.py. So it matters not which loss it is,
and in which stage its parts are made. It is done once, and again when something changes that bears on it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pippy.drivers.base.errors import ClusterError, MicrobatchError
from pippy.drivers.batch.columns import Column, DivisionOfColumns
from pippy.drivers.batch.divide_call import guarded_inputs
from pippy.drivers.batch.division import CutTensor, DividedValue, Division, SameForAll, divided_leaves
from pippy.drivers.batch.loss_weights import loss_weights, reduction_of
from pippy.drivers.compare.asked import Asked, Chosen, Question
from pippy.drivers.compare.tolerance import LEAST, Tolerance, floor_of
from pippy.drivers.driver.check.edits import edited
from pippy.drivers.driver.check.reductions import Candidate, candidates
from pippy.drivers.driver.check.rows import NoRows, TriedRows, places_of
from pippy.drivers.driver.check.trial_steps import TrialSteps, Tried
from pippy.drivers.protocol.trials import Difference, Purpose
from pippy.drivers.worker.measure.watch import Watch
from pippy.ir.base.errors import PippyError
from pippy.ir.base.names import LOSS
from pippy.ir.base.trees import leaves
from pippy.ir.call.signature import check_guards

_SHOWN = 5  # differences, in an error
_TRIED = 4  # reductions, in trials
_NEARLY = 1e-3  # of a loss: reductions that give it otherwise are not tried


@dataclass(frozen=True)
class Way:
    """How the losses of micro-batches are said to add up: by a reduction, or ``single``, as one loss over all."""

    how: str | Callable[..., Any] | None
    single: bool = False


@dataclass(frozen=True)
class Found:
    """What the comparison of one set of rows found: the reference, two micro-batches, and what differs."""

    rows: TriedRows
    whole: Tried
    parts: Tried
    allowed: float  # of the loss

    @property
    def loss_differs(self) -> bool:
        return not abs(self.parts.loss - self.whole.loss) <= self.allowed

    def differences(self, buffers: bool) -> list[Difference]:
        """What differs, worst first."""
        found = [each for each in self.parts.differences if buffers or each.kind != "buffer"]
        return sorted(found, key=lambda each: -each.share)

    def agrees(self, buffers: bool) -> bool:
        return not self.loss_differs and not self.differences(buffers)

    def misses(self, weights: Sequence[float]) -> float:
        """By how much of the loss the losses of the micro-batches do not add up with these weights; 0 if they do."""
        total = sum(weight * loss for weight, loss in zip(weights, self.parts.losses) if weight)
        off = abs(total - self.whole.loss)
        return 0.0 if off <= self.allowed else off / max(abs(self.whole.loss), self.allowed)


@dataclass(frozen=True)
class Unchecked:
    """A kind of step that could not be checked, and why."""

    kind: Any
    reason: str


class Unlike(Exception):
    """Nothing can be compared; the message says why."""


class NotFinite(Unlike):
    """The loss is no number: another step may show more."""


class FirstStep:
    """Checks the first steps of one driver. ``reduction`` is what it was given as ``loss_reduction``.

    With ``buffers``, those that forward changes are compared, too. ``fits`` says whether workers may hold so many rows at a
    time.
    """

    def __init__(
        self,
        trials: TrialSteps,
        reduction: str | Callable[..., Any] | None,
        single_loss: bool,
        buffers: bool,
        may_be_single: bool,
        fits: Callable[[Division], bool] = lambda division: True,
    ) -> None:
        self.trials, self.reduction, self.single_loss = trials, reduction, single_loss
        self.buffers, self.may_be_single, self.fits = buffers, may_be_single, fits
        self.compiled = trials.placed.compiled
        self.found: Candidate | None = None  # the reduction that a loss of torch says itself
        self._checked: list[Any] = []
        self._awaited: tuple[Question, ...] = ()  # by which a loss of torch may leave targets out that no step has held

    @property
    def how(self) -> str | Callable[..., Any] | None:
        """How the losses of micro-batches add up, as far as it was given or found."""
        return self.found.how if self.found is not None else self.reduction

    @property
    def _way(self) -> Way:
        return Way(self.how, self.single_loss)

    def check(self, division: Division, columns: Sequence[Column]) -> "Unchecked | None":
        """Check a step that is to be run, if it is of another kind than those before. Raises if its numbers would be wrong.

        Gives the reason if nothing could be compared.
        """
        kind = self._kind(division)
        held = self._holds_awaited(division)
        if division.chunks == 1 or division.mask or (kind in self._checked and not held):
            return None
        unchecked = None
        try:
            self._check(division, columns, held)
            self._checked.append(kind)
        except NotFinite:
            pass
        except (Unlike, NoRows) as error:
            unchecked = Unchecked(kind, str(error))
        except MicrobatchError:
            self.trials.forget()
            raise
        self.trials.forget()
        return unchecked

    def _holds_awaited(self, division: Division) -> bool:
        """Whether targets are left out now that no step has held before."""
        for question in self._awaited:
            for place, leaf in places_of(division):
                held = leaf.held()
                if place == question.place and isinstance(held, torch.Tensor) and bool((held == question.value).any()):
                    return True
        return False

    def forget(self) -> None:
        """A worker was replaced, which does not know which buffers change."""
        self._checked.clear()
        self._awaited = ()

    def note(self, unchecked: "Unchecked") -> None:
        """Steps of this kind are not to be checked again."""
        self._checked.append(unchecked.kind)

    def _kind(self, division: Division) -> Any:
        """What bears on whether a step may be cut: modes, and the kinds of arguments."""
        flags = {call: its.training for calls in self.trials.placed.flags().values() for call, its in calls.items()}
        return flags, {name: _kinds(value) for name, value in division.arguments.items()}

    def _check(self, division: Division, columns: Sequence[Column], with_padding: bool = False) -> None:
        rows = self._counting(self._rows(division, columns))
        sets = [self._compared(rows, watch=True)]
        if sum(rows.sizes) > 2 and sets[0].agrees(self.buffers):
            sets.append(self._cut_elsewhere(sets[0]))
        asked = self._asked(rows, sets[0])
        for other in edited(rows, asked, self.compiled.target_name):
            try:
                sets.append(self._compared(self._counting(other), watch=True))
            except Unlike:  # the model does not take such targets
                continue
        if not all(each.agrees(self.buffers) for each in sets):
            self._remedy(sets, asked, with_padding)
        if self.reduction is None and not self.single_loss:
            self._check_choices(sets)

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

    def _counting(self, rows: TriedRows, way: Way | None = None) -> TriedRows:
        """The rows in an order in which both micro-batches count, if there is one: else nothing would be compared."""
        turned = (rows.rotated(by) for by in range(sum(rows.sizes)))
        return next((each for each in turned if all(self._weights(each.divided(2), way or self._way))), rows)

    def _asked(self, rows: TriedRows, found: Found) -> Asked:
        """What is asked of the rows, by the model and by a reduction that was given."""
        asked = found.whole.asked
        if callable(self.reduction):
            division = rows.divided(1)
            with Watch(division) as watch:
                self._weights(division, Way(self.reduction))
            asked = replace(asked, questions=(*asked.questions, *watch.asked().questions))
        return asked

    def _check_guards(self, rows: TriedRows) -> None:
        """Raise if the Pipe was not traced for so many rows."""
        for division in (rows.divided(1), rows.divided(2)) if self.compiled.guards.are_of_rows else ():
            names = guarded_inputs(self.compiled, division)
            for chunk in range(division.chunks):
                check_guards(self.compiled, {name: division.take(name, chunk) for name in names})

    # Comparing

    def _weights(self, division: Division, way: Way) -> tuple[float, ...]:
        if way.single:
            return (1.0,) * division.chunks
        return loss_weights(self._loss, division, self.compiled.target_name, way.how)

    @property
    def _loss(self) -> Any:
        """The loss's module; None if the model returns its loss."""
        return self.compiled.stage(LOSS) if LOSS in self.compiled.split_gm._modules else None

    def _compared(self, rows: TriedRows, way: Way | None = None, watch: bool = False) -> Found:
        """Compare the rows as one micro-batch with the same as two, whose losses add up in this way, or in the known one.

        How much rounding moves is measured only where it may matter.
        """
        way = way or self._way
        whole = self._tried(rows, way, Purpose.REFERENCE, watch)
        if not (math.isfinite(whole.loss) and whole.is_finite):
            raise NotFinite(f"the loss of a few rows is {whole.loss}, or a gradient is no number")
        found = Found(rows, whole, self._tried(rows, way, Purpose.COMPARED), self._allowed(whole, 0.0))
        of_buffers = any(each.kind == "buffer" for each in found.parts.differences)
        off = abs(found.parts.loss - whole.loss)
        if found.agrees(True) or (off > self._allowed(whole, math.inf) and not of_buffers):
            return found
        turned = self._tried(rows, way, Purpose.NOISE)
        parts = self._tried(rows, way, Purpose.COMPARED, follow=True)
        if self.buffers and any(each.kind == "buffer" for each in parts.differences):
            parts = self._tried(rows, way, Purpose.COMPARED, follow=True)  # they change once in a step now
        return Found(rows, whole, parts, self._allowed(whole, abs(turned.loss - whole.loss)))

    def _tried(self, rows: TriedRows, way: Way, purpose: Purpose, watch: bool = False, follow: bool = False) -> Tried:
        """Run a trial. Raises `Unlike` if it cannot be computed."""
        division = rows.divided(2 if purpose is Purpose.COMPARED else 1, turned=purpose is Purpose.NOISE)
        weights = self._weights(division, way)
        try:
            return self.trials.run(division, weights, purpose, watch, way.single, follow=follow)
        except ClusterError:
            raise
        except PippyError as error:
            part = "a part" if purpose is Purpose.COMPARED else "a few"
            raise Unlike(f"{part} of the rows cannot be computed alone: {error}") from error

    def _allowed(self, whole: Tried, noise: float) -> float:
        size = abs(whole.loss)
        return Tolerance(size, noise, size, self._floor(whole)).allowed

    def _floor(self, tried: Tried) -> float:
        device = self.trials.device_type
        casts = [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
        dtypes = [each.dtype for _, stage in self.compiled.stages() for each in stage.parameters()]
        return max(LEAST, floor_of(tried.dtype, *casts, *dtypes))

    def _cut_elsewhere(self, found: Found, way: Way | None = None) -> Found:
        """Compare what was just compared with two other micro-batches: the first two may agree by chance."""
        way = way or self._way
        rows = self._counting(found.rows.cut_elsewhere(), way)
        return replace(found, rows=rows, parts=self._tried(rows, way, Purpose.COMPARED))

    # What is said

    def _check_choices(self, sets: Sequence[Found]) -> None:
        """Raise if the loss is a mean over what a mask chooses that chose all numbers in all rows that were tried."""
        chosen = [each.whole.asked.chosen for each in sets]
        for untried in (each for each in chosen[0] if each.are_all):
            if all(other.are_all for others in chosen for other in others if other.where == untried.where):
                raise MicrobatchError(_unknown_choice(untried))

    def _remedy(self, sets: Sequence[Found], asked: Asked, with_padding: bool) -> None:
        """Find how the losses add up. Raises, with that for advice, unless a loss of torch says it itself.

        What torch's losses leave out may never come. If nothing else is wrong, it is waited for, unless it is there now.
        """
        wrong = next(each for each in sets if not each.agrees(self.buffers))
        only_buffers = not wrong.loss_differs and all(each.kind == "buffer" for each in wrong.differences(True))
        if only_buffers:
            raise MicrobatchError(self._said_of(wrong) + _ADVICE_FOR_BUFFERS)
        rows = [each.rows for each in sets if each.rows.order == sorted(each.rows.order) or each.rows.edits]
        fitting = (each for each in self._candidates(sets, asked) if self._fits(rows, Way(each.how)))
        candidate = next(fitting, None)
        if candidate is None and self._draws(sets[0]):
            if self.reduction is not None or reduction_of(self._loss).known:
                return
            raise MicrobatchError(
                "the loss draws random numbers that are not torch's, so its parts cannot be compared with the whole, to see "
                "how they add up. Give the driver loss_reduction='mean' if it is a mean over rows, or run one micro-batch, "
                "chunks=1"
            )
        if candidate is not None and candidate.counted and self.reduction is None:
            self.found = candidate
            self.trials.datasets.weigh_by(candidate.how)
            return
        others = {each.place for each in asked.questions if not each.counted}
        only = {each.place for each in asked.questions if each.counted} - others
        if self.compiled.target_name is not None and None in others:  # it was tried with the target
            only = set()
        edited_places = {place for each in rows for place in each.edits}
        if wrong.rows.edits and not with_padding and edited_places <= only:
            self._awaited = asked.questions
            if not self._holds_awaited(rows[0].division):
                return
        if candidate is not None:
            raise MicrobatchError(
                f"{self._said_of(wrong)}They do if you give the driver loss_reduction={candidate.text}"
            )
        advice = next(self._other_advice(rows), None)
        if advice is None:
            advice = (
                "No other known reduction fits either: numbers of several rows are put together. Run one micro-batch, "
                "chunks=1. If you know that the difference does not matter, give the driver check=False"
            )
        raise MicrobatchError(self._said_of(wrong) + advice)

    def _draws(self, found: Found) -> bool:
        """Whether the same rows give something else when they are computed again."""
        division = found.rows.divided(1)
        weights = self._weights(division, self._way)
        self.trials.run(division, weights, Purpose.REFERENCE, single_loss=self.single_loss)
        again = self.trials.run(division, weights, Purpose.COMPARED, single_loss=self.single_loss, number=1)
        return bool(again.differences) or not abs(again.loss - found.whole.loss) <= found.allowed

    def _candidates(self, sets: Sequence[Found], asked: Asked) -> Iterator[Candidate]:
        """The reductions with which losses nearly add up, in all sets: the best ones first."""
        every = candidates(sets[0].rows.divided(1), asked, self.compiled.target_name)
        missing = [(max(self._misses(found, each) for found in sets), each) for each in every]
        best = sorted((each for each in missing if each[0] <= _NEARLY), key=lambda each: (each[0], not each[1].counted))
        yield from (candidate for _, candidate in best[:_TRIED])

    def _misses(self, found: Found, candidate: Candidate) -> float:
        try:
            return found.misses(self._weights(found.rows.divided(2), Way(candidate.how)))
        except (PippyError, RuntimeError, IndexError, TypeError, ValueError):  # it does not count such targets
            return math.inf

    def _fits(self, rows: Sequence[TriedRows], way: Way) -> bool:
        try:
            for each in rows:
                found = self._compared(self._counting(each, way), way)
                if not (found.agrees(self.buffers) and self._cut_elsewhere(found, way).agrees(self.buffers)):
                    return False
        except (Unlike, PippyError):
            return False
        return True

    def _other_advice(self, rows: Sequence[TriedRows]) -> Iterator[str]:
        if self.may_be_single and not self.single_loss and self._fits(rows, Way(None, single=True)):
            yield (
                "Compute the loss once, over all: PipelineDriverFillDrain(pipe, single_loss=True); or run one micro-batch, "
                "chunks=1"
            )
        users = {name: user for user, name in rows[0].division.names.items()}
        for name, value in rows[0].division.arguments.items():
            if isinstance(value, CutTensor) and self._fits([rows[0].with_argument(name, _same_for_all)], Way(self.how)):
                yield (
                    f"They do if {users.get(name, name)!r} is no part of the batch: give the driver "
                    f"chunk_spec={{{users.get(name, name)!r}: Replicate()}}"
                )

    def _said_of(self, found: Found) -> str:
        one, two = found.rows.sizes
        count = one + two
        text = (
            f"{count} of the rows{self._edits_of(found.rows)} as one micro-batch and the same as two, of {one} and {two} rows, "
            "do not give the same numbers, so the step would not be the plain model's. The losses of the micro-batches "
        )
        kind = self._spelled()
        if found.loss_differs:
            parts = " and ".join(f"{loss:.6g}" for loss in found.parts.losses)
            text += (
                f"do not add up to the loss of the whole as {kind}: they are {parts}, together "
                f"{found.parts.loss:.6g}, and the whole is {found.whole.loss:.6g}. "
            )
        else:
            text += f"add up as {kind}, but not all else does. "
        differences = found.differences(self.buffers)
        text = text.rstrip() if differences else text
        for each in differences[:_SHOWN]:
            text += f"\n  {each.kind} of {self._user_name(each)}: off by {each.share:.2g} of its size"
        more = len(differences) - _SHOWN
        return text + (f"\n  and {more} more" if more > 0 else "") + "\n" * bool(differences)

    def _edits_of(self, rows: TriedRows) -> str:
        """Which numbers were put into the rows, as later batches may have them."""
        users = {name: user for user, name in rows.division.names.items()}
        said = [f"{users.get(place[0], place[0])!r} is {_listed(edit.values)}" for place, edit in rows.edits.items()]
        return f", in some of which {' and '.join(said)}," if said else ""

    def _spelled(self) -> str:
        if self.single_loss:
            return "one loss over all"
        if callable(self.how):
            return "loss_reduction counts"
        kind = self.how or reduction_of(self._loss).kind
        return "a sum" if kind == "sum" else "a mean over rows"

    def _user_name(self, each: Difference) -> str:
        if each.call == LOSS:
            return repr(f"{LOSS}.{each.name}")
        return f"{self.compiled.remap_qualname(f'{each.call}.{each.name}')!r} ({each.call})"


_ADVICE_FOR_BUFFERS = (
    "Forward changes these buffers by the rows that it is given, so each micro-batch would change them by its own. "
    'If that may be, give the driver buffers="per_microbatch"; else keep it out of forward, or run one micro-batch, '
    "chunks=1"
)


def _listed(values: Sequence[float]) -> str:
    return " or ".join(dict.fromkeys(f"{value:g}" if isinstance(value, float) else str(value) for value in values))


def _unknown_choice(chosen: Chosen) -> str:
    return (
        "the loss is a mean over what a mask chooses. It has chosen all in the rows that were tried, so how the losses of "
        f"micro-batches add up when it does not cannot be seen:\n  {chosen.where}\nSay it with loss_reduction=: a function "
        "that counts what a micro-batch holds, as lambda target: (target >= 0).sum(); or 'mean', if rows are never left out"
    )


def _same_for_all(leaf: DividedValue) -> DividedValue:
    return SameForAll(leaf.value, leaf.requires_grad) if isinstance(leaf, CutTensor) else leaf


def _kinds(value: Any) -> Any:
    """What of an argument bears on how it is cut: classes, dtypes, dimensions; what is no tensor as it is, if it is short."""
    return tuple(_kind(leaf) for leaf in divided_leaves(value))


def _kind(leaf: DividedValue) -> Any:
    its = itertools.islice(leaves(leaf.held()), _SHOWN)
    kinds = [(each.dtype, each.dim()) if isinstance(each, torch.Tensor) else _constant(each) for each in its]
    return type(leaf), getattr(leaf, "dim", None), tuple(kinds)


def _constant(value: Any) -> Any:
    return value if isinstance(value, (bool, str, int)) else type(value)
