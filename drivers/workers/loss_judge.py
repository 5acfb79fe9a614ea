"""Finds how the losses of parts of a batch add up to the loss of the whole.

A sample is cut in two unequal parts:

    L(rows 0 to n)   ==   w · L(rows 0 to k)  +  w' · L(rows k to n)        with the weights that the step assumes

If that is not so, the other reductions are tried, and the one that fits is reported. Targets that hold a value which
losses often leave out, such as -100, are tried with more of it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from pippy.drivers.batches.division import Division
from pippy.drivers.batches.loss_check import LossCheck, LossReport
from pippy.drivers.batches.loss_weights import IGNORED
from pippy.drivers.batches.target_questions import Question, is_index
from pippy.drivers.workers.comparisons import Comparisons
from pippy.drivers.workers.cross_entropies import CrossEntropies
from pippy.drivers.workers.known_reductions import KnownReductions, Weights, alone, by_rows
from pippy.drivers.workers.loss_sample import Cut, Place, Sample
from pippy.ir.errors import InputError
from pippy.ir.names import LOSS
from pippy.ir.passes.loss_function import FunctionLoss
from pippy.ir.row_sizes import is_known
from pippy.ir.run.random_state import seed_all
from pippy.ir.sparse_tensors import map_stored
from pippy.ir.trees import children

_DOUBLED = 1 << 24  # elements that may be checked in float64
_QUESTIONS = 6  # about targets, that are tried
_CUTS = 8  # of a sample, and targets in them, to find the reduction that fits
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


class Call(Protocol):
    """What computes the loss."""

    @property
    def name(self) -> str: ...

    @property
    def module(self) -> nn.Module: ...

    def run(self, inputs: Sequence[Any]) -> Any: ...


class NotPossible(Exception):
    """The loss cannot be computed for parts, or not be compared."""


class TooFewRows(NotPossible):
    """The sample cannot be cut in two."""


class Judge:
    """Finds how the losses of parts add up. ``computed`` are the numbers of the inputs that the user did not give."""

    def __init__(
        self,
        check: LossCheck,
        call: Call,
        index: int | None,
        names: Sequence[str],
        computed: Sequence[int],
        division: Division,
    ) -> None:
        self.check, self.call, self.index, self.names, self.computed = check, call, index, names, computed
        self.least = 1  # rows of a part
        self.given = {name: division.arguments[name] for name in check.inputs if name in division.arguments}

    def judge(self, sample: Sample, last: bool) -> LossReport | None:
        """A report; None if the sample says nothing and more micro-batches are to come."""
        try:
            sample = self._prepared(sample)
            whole = self._loss(sample)
        except Exception:  # if it is the loss that is wrong, the step itself is going to say so
            return LossReport(possible=False)
        if not math.isfinite(whole):
            return LossReport(conclusive=False) if last else None
        if not self._has_rows(sample):
            sample = self._guessed(sample)
        if sample.rows < 2 or not self._has_rows(sample):
            return LossReport(possible=False)
        try:
            report = self._report(sample)
        except TooFewRows:
            return LossReport(possible=False) if last else None
        training = [module for module in self.call.module.modules() if module.training]
        if not report.fits and training and not isinstance(self.call.module, FunctionLoss):
            for module in training:
                module.training = False
            calm = self._report(sample)
            report = calm if calm.fits or not calm.random else report
        return report

    def _prepared(self, sample: Sample) -> Sample:
        """In float64 where the loss can take it, for a sharper comparison."""
        elements = sum(leaf.numel() for _, leaf, _ in sample.tensors())
        if self.call.name == LOSS and elements <= _DOUBLED and not any(True for _ in self.call.module.parameters()):
            with suppress(Exception):
                doubled = sample.mapped(lambda _, leaf, dim: leaf.double() if leaf.is_floating_point() else leaf)
                self._loss(doubled)
                return doubled
        return sample

    def _loss(self, sample: Sample, seed: int = 0) -> float:
        return self._loss_of(sample.copied(), seed)

    def _loss_of(self, sample: Sample, seed: int = 0) -> float:
        seed_all(seed)
        value = self.call.run(sample.given())
        value = _at(value if self.index is None else value[self.index], self.check.seed)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise NotPossible
        self.dtype = value.dtype
        return float(value.detach().double())

    def _report(self, sample: Sample) -> LossReport:
        own = sample.copied()
        with CrossEntropies() as entropies, Comparisons(self._addresses(own)) as comparisons:
            whole = self._loss_of(own)
        if abs(self._loss(sample, seed=1) - whole) > 1e-2 * self._tolerance(sample) * abs(whole):
            return LossReport(fits=False, random=True)
        try:
            cuts = self._first_cuts(sample)
        except TooFewRows:
            raise
        except Exception as error:
            if self.call.name == LOSS or _is_known(sample):
                return LossReport(fits=False, seen=f"for a part of the rows it raised {type(error).__name__}: {error}")
            sample = self._guessed(sample)  # it may have been cut wrongly
            try:
                cuts = self._first_cuts(sample)
            except TooFewRows:
                raise
            except Exception:
                return LossReport(possible=False)
        conclusive = True
        if all(cut.alike() for cut in cuts):
            conclusive = False
            with suppress(Exception):
                noisy = self._cuts(self._noisy(sample))
                conclusive, cuts = not all(cut.alike() for cut in noisy), cuts + noisy
        asked = [*entropies.ignored(), *list(comparisons.questions)[:_QUESTIONS], *self._constants(sample)]
        held = [each for each in [*asked, Question("==", 0), Question("==", -1)] if each.is_held(self.given)]
        for question in dict.fromkeys([*self.check.held, *held, *entropies.classes()]):
            with suppress(Exception):
                cuts = cuts + self._answers(sample, question)
        wrong = [cut for cut in cuts if not cut.fits(self._assumed()(cut))]
        if wrong:
            reduction = self._reduction(sample, cuts, entropies, [*asked, *self.check.held])
            if reduction is None and sample.flattened() and not sample.spread:
                spread = self._report(replace(sample, spread=True))  # the rows may stand in the other order
                if spread.fits or spread.reduction is not None:
                    return spread
                if sample.is_joined or sample.flattened() > 1:  # which they cannot in some of the tensors only
                    return LossReport(possible=False)
            return LossReport(fits=False, reduction=reduction, seen=_seen(wrong[0]))
        unseen = [each for each in dict.fromkeys(asked) if each not in held and not self._is_no_matter(sample, each)]
        return LossReport(conclusive=conclusive, unseen=tuple(unseen))

    def _has_rows(self, sample: Sample) -> bool:
        """Whether a computed input has rows, or none of them depends on what the rows hold."""
        known = self.call.name != LOSS and _is_known(sample)
        return any(dim is not None for (number, _), _, dim in sample.tensors() if known or number in self.computed)

    def _guessed(self, sample: Sample) -> Sample:
        """The sample with another guess of where the rows are, if that is a guess at all."""
        return sample if self.call.name == LOSS else sample.guessed(self.computed)

    def _targets(self, sample: Sample) -> Iterator[tuple[tuple[str, int], torch.Tensor, int | None]]:
        """The tensors that the user gave, where they are in the inputs of the Pipe, and their dimensions."""
        for (number, index), leaf, dim in sample.tensors():
            if number not in self.computed and leaf.layout is torch.strided:
                yield (self.names[number], index), leaf, dim

    def _addresses(self, sample: Sample) -> dict[int, tuple[str, int]]:
        return {leaf.untyped_storage().data_ptr(): place for place, leaf, _ in self._targets(sample)}

    def _constants(self, sample: Sample) -> list[Question]:
        """Whether the tensors that are of one number, as a mask of nothing but True, are of this number."""
        return [
            Question("!=", leaf.flatten()[0].item(), place)
            for place, leaf, dim in self._targets(sample)
            if dim is not None and leaf.numel() and bool((leaf == leaf.flatten()[0]).all())
        ]

    def _answers(self, sample: Sample, question: Question, places: Iterable[int] | None = None) -> list[Cut]:
        """Cuts of the sample in which targets have different answers."""
        held = [self._holding(sample, value, question.place) for value in question.examples()]
        return [cut for each in held for cut in self._cuts(each, places)]

    def _is_no_matter(self, sample: Sample, question: Question) -> bool:
        """Whether the loss adds up for any answers of its targets."""
        try:
            cuts = self._answers(sample, question, [max(sample.rows // 3, self.least)])
        except Exception:
            return False
        return all(cut.fits(self._assumed()(cut)) for cut in cuts)

    def _reduction(
        self, sample: Sample, cuts: Sequence[Cut], entropies: CrossEntropies, asked: Sequence[Question]
    ) -> str | None:
        """The known reduction that fits, also for the sample with other targets: with few rows, several may fit by chance."""
        cuts = [*cuts, *self._more_cuts(sample, asked)]
        users = [self.check.inputs.get(name) for name in self.names]
        known = KnownReductions(sample.inputs, users, entropies.calls, [*asked, Question("==", IGNORED)])
        return next((text for text, weights in known if _all_fit(cuts, weights)), None)

    def _more_cuts(self, sample: Sample, asked: Sequence[Question]) -> list[Cut]:
        """Cuts after each row, with all targets that there are, or may be, in the first row, and with others in the last."""
        places = range(self.least, min(sample.rows - self.least + 1, _CUTS))
        found = self._cuts(sample, places)
        for question in asked:
            with suppress(Exception):
                found += self._answers(sample, question, places)
        for place, leaf, dim in self._targets(sample):
            if dim is None:
                continue
            values = [*leaf.unique()[:_CUTS].tolist(), *range(_CUTS)] if is_index(leaf) else [0, 0.5, 1]
            for value, other in pairwise(dict.fromkeys(values)):
                with suppress(Exception):
                    last = self._holding(sample, other, place, sample.rows - 1)
                    found += self._cuts(self._holding(last, value, place), places)
                    if leaf.dim() > 1:
                        found += self._cuts(self._holding(last, value, place, corner=True), places)
        return found

    def _tolerance(self, sample: Sample) -> float:
        if torch.is_autocast_enabled(_device(sample)):
            return 2e-2
        kinds = [leaf.dtype for (number, _), leaf, _ in sample.tensors() if number in self.computed]
        return max(_TOLERANCES.get(kind, 2e-2) for kind in [self.dtype, *kinds] if kind.is_floating_point)

    def _first_cuts(self, sample: Sample) -> list[Cut]:
        """Cuts of a sample. The Pipe may have been traced for more than one row."""
        try:
            return self._cuts(sample)
        except Exception as error:
            if not isinstance(error.__cause__, InputError):
                raise
        self.least = 2
        if sample.rows < 2 * self.least:
            raise TooFewRows
        return self._cuts(sample)

    def _cuts(self, sample: Sample, places: Iterable[int] | None = None) -> list[Cut]:
        whole, rows = self._loss(sample), sample.rows
        if not math.isfinite(whole):  # nothing adds up to it
            return []
        found = []
        for at in dict.fromkeys((max(rows // 3, self.least), rows - self.least)) if places is None else places:
            parts = sample.part(0, at), sample.part(at, rows)
            losses = self._loss(parts[0]), self._loss(parts[1])
            found.append(
                Cut((parts[0].inputs, parts[1].inputs), (at, rows - at), losses, whole, self._tolerance(sample))
            )
        return found

    def _noisy(self, sample: Sample) -> Sample:
        """Other values in place of computed ones: where all rows have the same loss, no weights could be told apart."""

        def noisy(place: Place, leaf: torch.Tensor, dim: int | None) -> torch.Tensor:
            if place[0] not in self.computed or not leaf.is_floating_point():
                return leaf
            return map_stored(lambda values: values + 0.01 * torch.randn_like(values), leaf)

        seed_all(2)
        return sample.mapped(noisy)

    def _holding(
        self, sample: Sample, value: float, only: tuple[str, int] | None = None, row: int = 0, corner: bool = False
    ) -> Sample:
        """The same with this target in all of a row, or in its first place: of one tensor, or of all integers of the user."""
        changed = []

        def holding(place: Place, leaf: torch.Tensor, dim: int | None) -> torch.Tensor:
            name = self.names[place[0]]
            if (
                place[0] in self.computed
                or dim is None
                or not (is_index(leaf) if only is None else only == (name, place[1]))
            ):
                return leaf
            if not self._may_hold(name, leaf, value):
                return leaf
            changed.append(place)
            leaf = leaf.clone()
            each = leaf.shape[dim] // sample.rows
            held = leaf.narrow(dim, row * each, each)
            held[(slice(1),) * held.dim() if corner else ...].fill_(value)
            return leaf

        held = sample.mapped(holding)
        if not changed:
            raise NotPossible
        return held

    def _may_hold(self, name: str, leaf: torch.Tensor, value: float) -> bool:
        """Whether a loss can be tried with this: a GPU does not recover from an index that is out of range."""
        if not leaf.is_cuda or not is_index(leaf) or 0 <= value <= int(leaf.max()):
            return True
        return Question("==", value).is_held({name: self.given[name]})

    def _assumed(self) -> Weights:
        return alone if self.check.kind == "sum" else by_rows


def _seen(cut: Cut) -> str:
    """What is seen of a cut whose losses do not add up."""
    return "{} and {} rows have the losses {:.6g} and {:.6g}, together {:.6g}".format(*cut.rows, *cut.losses, cut.whole)


def _is_known(sample: Sample) -> bool:
    """Whether it is known of all inputs where their rows are."""
    return all(map(is_known, sample.row_sizes))


def _all_fit(cuts: Sequence[Cut], weights: Weights) -> bool:
    try:
        return all(cut.fits(weights(cut)) for cut in cuts)
    except Exception:  # it cannot count this
        return False


def _at(value: Any, seed: Any) -> Any:
    """What lies in a value where the seed of the loss is."""
    while isinstance(seed, (list, tuple)):
        index = next(number for number, each in enumerate(seed) if each is not None)
        value, seed = (children(value) or ())[index], seed[index]
    return value


def _device(sample: Sample) -> str:
    found = [leaf.device.type for _, leaf, _ in sample.tensors()]
    return next((each for each in found if each != "cpu"), "cpu")
