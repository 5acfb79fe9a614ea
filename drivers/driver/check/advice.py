"""The advice for rows that do not agree: another reduction of the losses, a single loss, or rows that are not cut.

Reductions are tried before they are advised. The rest is said, with the inputs that may be cut in a wrong place.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.batch.divide import advice_for_failure
from pippy.drivers.batch.division import Division
from pippy.drivers.batch.specs import items_with_paths
from pippy.drivers.compare.trial_notes import Question, TrialNotes
from pippy.drivers.driver.check.comparisons import Compared, Comparisons, LossReduction
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


def fitting_reduction(
    comparisons: Comparisons, every: Sequence[TriedRows], compared: Sequence[Compared], asked: TrialNotes
) -> CandidateReduction | None:
    """The first reduction with which all sets of rows agree. Only those are tried that give their losses."""
    target = comparisons.compiled.target_name
    missing = [
        (_misses(comparisons, compared, each), each)
        for each in candidate_reductions(every[0].divided(1), asked, target)
    ]
    best = sorted((each for each in missing if each[0] <= _NEARLY), key=lambda each: (each[0], not each[1].counted))
    return next((each for _, each in best[:_TRIED] if comparisons.fit(every, LossReduction(each.how))), None)


def _misses(comparisons: Comparisons, compared: Sequence[Compared], candidate: CandidateReduction) -> float:
    """The largest difference between the loss and the sum of the micro-batches' losses with this reduction."""
    reduction = LossReduction(candidate.how)
    try:
        return max(each.misses(comparisons.weights(each.rows.divided(2), reduction)) for each in compared)
    except (PippyError, RuntimeError, IndexError, TypeError, ValueError):  # it does not count such targets
        return math.inf


def other_advice(
    comparisons: Comparisons, every: Sequence[TriedRows], reduction: LossReduction, may_be_single: bool
) -> str:
    """The advice if no reduction helps. ``may_be_single`` says whether the driver can have a single loss."""
    if may_be_single and not reduction.single and comparisons.fit(every, LossReduction(None, single=True)):
        return (
            "Compute the loss once, over all: PipelineDriverFillDrain(pipe, single_loss=True); or run one micro-batch, "
            "chunks=1"
        )
    of_rows = comparisons.compiled.guards.are_of_rows
    why = "the model mixes rows, or depends on how many there are"
    return (
        f"No other known reduction fits either: {'forward depends on the number of rows' if of_rows else why}. Run one "
        "micro-batch, chunks=1. If you know that the difference does not matter, give the driver check=False\n"
        f"{advice_for_failure(every[0].mini_batch, 0)}"
    ).rstrip()


def candidate_reductions(division: Division, asked: TrialNotes, target: str | None) -> Iterator[CandidateReduction]:
    """The reductions that may fit a loss of these inputs. ``target`` is the target's name in the Pipe, if there is one."""
    yield CandidateReduction("'mean'", "mean")
    yield CandidateReduction("'sum'", "sum")
    users = {name: user for user, name in division.names.items()}
    for name in sorted(division.arguments, key=lambda name: name != target):
        user = users.get(name, name)
        if not user.isidentifier():
            continue
        for expression, leaf in _tensors_with_paths(division.take(name, 0), user):
            for count, counted in _counts(expression, leaf, asked.questions).items():
                text = f"lambda {'' if name == target or target is None else '*, '}{user}: {count}"
                yield CandidateReduction(text, eval(text, {"torch": torch}), counted)


def _counts(expression: str, leaf: torch.Tensor, questions: Sequence[Question]) -> dict[str, bool]:
    """Expressions that count the numbers in a tensor, first those that questions are about. Each comes with whether a loss of
    torch counts so."""
    found: dict[str, bool] = {}
    index = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    # a causal language model shifts its labels
    views = [expression, f"{expression}[:, 1:]"] if leaf.dim() > 1 else [expression]
    for question in questions:
        if not index and (question.counted or question.place is None):
            continue
        for view in views:
            if question.weights:
                found[_weighing(view, question)] = True
            for count in () if question.weights else question.counts(view):
                found[count] = found.get(count, False) or (question.counted and "!=" in count)
    if leaf.dtype == torch.bool:
        return {**found, f"{expression}.sum()": False, f"(~{expression}).sum()": False}
    values = [-100, 0, *leaf.unique()[:_VALUES].tolist()] if index else [0]
    for view in views if index else [expression]:
        for value in dict.fromkeys(values):
            found.setdefault(f"({view} != {value}).sum()", False)
        found.setdefault(f"{view}.sum()", False)
    return found


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
