"""Finds the advice for rows that do not agree: another reduction, a single loss, or an input that is not cut. All are tried."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pippy.drivers.batch.division import CutTensor, DividedValue, Division, SameForAll
from pippy.drivers.batch.specs import items_with_paths
from pippy.drivers.compare.trial_notes import Question, TrialNotes
from pippy.drivers.driver.check.comparisons import Comparisons, LossReduction, RowComparison
from pippy.drivers.driver.check.rows import TriedRows
from pippy.ir.base.errors import PippyError

_TRIED = 4  # reductions, in trials
_VALUES = 8  # of a target that are tried, whether the loss leaves them out
_NEARLY = 1e-3  # of a loss: reductions that give it otherwise are not tried


@dataclass(frozen=True)
class CandidateReduction:
    """A reduction, as the user writes it, and as a driver takes it. With ``counted``, a loss of torch tells it."""

    text: str
    how: str | Callable[..., Any]
    counted: bool = False


class Remedies:
    """The advice for rows that do not agree. ``may_be_single`` says whether the driver can have a single loss."""

    def __init__(self, comparisons: Comparisons, may_be_single: bool) -> None:
        self.comparisons, self.may_be_single = comparisons, may_be_single

    def counts(self, comparison: RowComparison) -> Iterator[LossReduction]:
        """The reductions that a loss of torch tells and with which the losses add up, other than the one in use."""
        for candidate in self._candidates(comparison, comparison.asked):
            if candidate.counted and not self._misses([comparison], candidate):
                reduction = LossReduction(candidate.how)
                if self.comparisons.weights(comparison.rows.divided(2), reduction) != comparison.parts.weights:
                    yield reduction

    def reduction(self, sets: Sequence[RowComparison], asked: TrialNotes) -> CandidateReduction | None:
        """The first reduction with which all sets of rows agree."""
        missing = [(self._misses(sets, each), each) for each in self._candidates(sets[0], asked)]
        best = sorted((each for each in missing if each[0] <= _NEARLY), key=lambda each: (each[0], not each[1].counted))
        rows = [each.rows for each in sets]
        return next((each for _, each in best[:_TRIED] if self.comparisons.fit(rows, LossReduction(each.how))), None)

    def other_advice(self, rows: Sequence[TriedRows], reduction: LossReduction) -> str:
        """The advice if no reduction helps."""
        fit = self.comparisons.fit
        if self.may_be_single and not reduction.single and fit(rows, LossReduction(None, single=True)):
            return (
                "Compute the loss once, over all: PipelineDriverFillDrain(pipe, single_loss=True); or run one micro-batch, "
                "chunks=1"
            )
        for names, spec, how in self._other_specs(rows[0]):
            if fit([rows[0].with_arguments(names, how)], reduction):
                users = {name: user for user, name in rows[0].division.names.items()}
                said = ", ".join(f"{users.get(name, name)!r}: {spec}" for name in names)
                return f"They agree if you give the driver chunk_spec={{{said}}}; or run one micro-batch, chunks=1"
        of_rows = self.comparisons.compiled.guards.are_of_rows
        why = (
            "forward depends on the number of rows"
            if of_rows
            else "the model mixes rows, or depends on how many there are"
        )
        return (
            f"No other known reduction fits either: {why}. Run one micro-batch, chunks=1. If you know that the difference does "
            "not matter, give the driver check=False"
        )

    def _other_specs(
        self, rows: TriedRows
    ) -> Iterator[tuple[Sequence[str], str, Callable[[DividedValue], DividedValue]]]:
        """Other specs of inputs, to try: those that could be sequences first are cut along their next dimension, all or one by
        one; and one input is not cut, if the model has others that are."""
        target, given = self.comparisons.compiled.target_name, rows.division.arguments
        inputs = sorted(given.items(), key=lambda each: each[0] == target)  # the target last
        cut = [name for name, value in inputs if isinstance(value, CutTensor) and not rows.is_piece]
        turned = [name for name in cut if _next_dimension(given[name]) is not given[name]]
        for names in dict.fromkeys([tuple(turned), *((name,) for name in turned)]) if turned else ():
            yield names, "TensorChunkSpec(1)", _next_dimension
        for name in (
            cut if len([each for each in cut if each != target]) > 1 else ()
        ):  # else no rows of the model would be cut
            yield (name,), "Replicate()", _same_for_all

    def _candidates(self, comparison: RowComparison, asked: TrialNotes) -> Iterator[CandidateReduction]:
        return candidate_reductions(comparison.rows.divided(1), asked, self.comparisons.compiled.target_name)

    def _misses(self, sets: Sequence[RowComparison], candidate: CandidateReduction) -> float:
        """The largest difference between the loss and the sum of the micro-batches' losses with this reduction."""
        try:
            return max(
                each.misses(self.comparisons.weights(each.rows.divided(2), LossReduction(candidate.how)))
                for comparison in sets
                for each in comparison.both()
            )
        except (PippyError, RuntimeError, IndexError, TypeError, ValueError):  # it does not count such targets
            return math.inf


def _next_dimension(leaf: DividedValue) -> DividedValue:
    is_square = (
        isinstance(leaf, CutTensor)
        and leaf.dim == 0
        and leaf.value.dim() > 1
        and leaf.value.shape[0] == leaf.value.shape[1]
    )
    return replace(leaf, dim=1) if is_square else leaf  # type: ignore[call-arg]


def _same_for_all(leaf: DividedValue) -> DividedValue:
    return SameForAll(leaf.value, leaf.requires_grad) if isinstance(leaf, CutTensor) else leaf


def candidate_reductions(division: Division, asked: TrialNotes, target: str | None) -> Iterator[CandidateReduction]:
    """The reductions that may fit a loss of these inputs. ``target`` is the target's name in the Pipe, if there is one."""
    yield CandidateReduction("'mean'", "mean")
    yield CandidateReduction("'sum'", "sum")
    users = {name: user for user, name in division.names.items()}
    names = sorted(division.arguments, key=lambda name: name != target)
    for name in names:
        user = users.get(name, name)
        if not user.isidentifier():
            continue
        for expression, leaf in _tensors_with_paths(division.take(name, 0), user):
            for count, counted in _counts(expression, leaf, asked.questions):
                text = f"lambda {'' if name == target or target is None else '*, '}{user}: {count}"
                yield CandidateReduction(text, eval(text, {"torch": torch}), counted)


def _counts(expression: str, leaf: torch.Tensor, questions: Sequence[Question]) -> Iterator[tuple[str, bool]]:
    """Expressions that count the numbers in a tensor, first those that questions are about. Each comes with whether a loss of
    torch counts so."""
    expressions: dict[str, bool] = {}
    shifted = f"{expression}[:, 1:]"
    index = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    for question in questions:
        if not index and (question.counted or question.place is None):
            continue
        for each in (expression, shifted) if leaf.dim() > 1 else (expression,):
            if question.weights:
                expressions[_weighing(each, question)] = True
                continue
            for count in question.counts(each):
                expressions[count] = expressions.get(count, False) or (question.counted and "!=" in count)
    if leaf.dtype == torch.bool:
        expressions.update({f"{expression}.sum()": False, f"(~{expression}).sum()": False})
    elif index:
        for value in dict.fromkeys([-100, 0, *leaf.unique()[:_VALUES].tolist()]):
            expressions.setdefault(f"({expression} != {value}).sum()", False)
            if leaf.dim() > 1:
                expressions.setdefault(f"({shifted} != {value}).sum()", False)
        expressions.setdefault(f"{expression}.sum()", False)
        if leaf.dim() > 1:
            expressions.setdefault(f"{shifted}.sum()", False)
    elif leaf.is_floating_point():
        expressions.update({f"{expression}.sum()": False, f"({expression} != 0).sum()": False})
    yield from expressions.items()


def _weighing(expression: str, question: Question) -> str:
    """The sum of the class weights of targets."""
    table = f"torch.tensor({list(question.weights)}, dtype=torch.float64)"
    inside = f"{expression}.cpu()"
    return f"({table}[{inside}.clamp(min=0)] * ({inside} != {question.value:g})).sum()"


def _tensors_with_paths(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    held = items_with_paths(value, path)
    if held is None:
        yield from [(path, value)] if isinstance(value, torch.Tensor) and value.layout is torch.strided else []
    for where, item in held or ():
        yield from _tensors_with_paths(item, where)
