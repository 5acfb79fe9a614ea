"""The known reductions of losses, as they are written, and the weights that they give to the two parts of a sample."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pippy.drivers.batches.specs import items_with_paths
from pippy.drivers.batches.target_questions import Question, is_index
from pippy.drivers.workers.loss_sample import Cut

Weights = Callable[[Cut], tuple[float, float]]
_VALUES = 16  # values of a target that are tried, whether the loss leaves them out
_WRITTEN = 16  # class weights that are written out


class KnownReductions:
    """The reductions of a loss that is computed from ``inputs``, which the user calls ``names`` (None for computed values).

    ``calls`` are the cross entropies that the loss calls; by ``questions`` it may leave out targets.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        names: Sequence[str | None],
        calls: Sequence[Mapping[str, Any]],
        questions: Sequence[Question],
    ) -> None:
        self.inputs, self.names, self.calls, self.questions = inputs, names, calls, questions

    def __iter__(self) -> Iterator[tuple[str, Weights]]:
        yield "'sum'", alone
        yield "'mean'", by_rows
        for number, name in enumerate(self.names):
            if name is None or not name.isidentifier():
                continue
            for expression, leaf in _tensors_with_paths(self.inputs[number], name):
                for count, names in self._counts(expression, leaf):
                    text = f"lambda {name}: {count}"
                    yield text, _counted(eval(text, {"torch": torch, **names}), number)

    def _counts(self, expression: str, leaf: torch.Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
        """Expressions that count what a tensor holds, and the names that they use; first what the loss asks of it."""
        for question in self.questions:
            yield from ((count, {}) for count in question.counts(expression))
        if leaf.dtype == torch.bool:
            yield f"{expression}.sum()", {}
        elif leaf.is_floating_point():
            yield f"({expression} != 0).sum()", {}
            yield f"{expression}.clamp(min=0).sum()", {}
        elif is_index(leaf):
            for each in self.calls:
                weight = each.get("weight")
                if weight is not None and not (each.get("label_smoothing") and bool((weight == 0).any())):
                    yield _weighing(expression, weight, each.get("ignore_index", -100))
            some = leaf.unique()[:_VALUES].tolist()
            asked = [question.value for question in self.questions if question.sign == "=="]
            for value in dict.fromkeys([*asked, 0, *some]):
                yield f"({expression} != {value}).sum()", {}
                if leaf.dim() > 1:
                    yield f"({expression}[:, 1:] != {value}).sum()", {}
            yield f"{expression}.sum()", {}


def alone(cut: Cut) -> tuple[float, float]:
    """Losses are added up."""
    return 1.0, 1.0


def by_rows(cut: Cut) -> tuple[float, float]:
    """A mean over rows."""
    return cut.rows[0] / sum(cut.rows), cut.rows[1] / sum(cut.rows)


def _counted(count: Callable[[Any], Any], number: int) -> Weights:
    def weights(cut: Cut) -> tuple[float, float]:
        one, two = (float(count(part[number])) for part in cut.parts)
        return one / (one + two), two / (one + two)

    return weights


def _weighing(expression: str, weight: torch.Tensor, ignored: int) -> tuple[str, dict[str, Any]]:
    weight = weight.detach().cpu().double()
    short = weight.numel() <= _WRITTEN
    table = f"torch.tensor({weight.tolist()}, dtype=torch.float64)" if short else "class_weights"
    return f"({table}[{expression}.cpu().clamp(min=0)] * ({expression}.cpu() != {ignored})).sum()", {
        "class_weights": weight
    }


def _tensors_with_paths(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    held = items_with_paths(value, path)
    if held is None:
        yield from [(path, value)] if isinstance(value, torch.Tensor) else []
    for where, item in held or ():
        yield from _tensors_with_paths(item, where)
