"""The reductions of losses that are tried if the one that was assumed does not fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.batch.division import Division
from pippy.drivers.batch.specs import items_with_paths
from pippy.drivers.compare.trial_notes import Question, TrialNotes

_VALUES = 8  # of a target that are tried, whether the loss leaves them out


@dataclass(frozen=True)
class CandidateReduction:
    """A reduction, as the user writes it, and as a driver takes it. With ``counted``, a loss of torch tells it."""

    text: str
    how: str | Callable[..., Any]
    counted: bool = False


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
