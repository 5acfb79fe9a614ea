"""Which numbers a loss compares its targets with."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pippy.drivers.batches.target_questions import Question, is_index

_SIGNS = {
    "eq": "==",
    "ne": "==",
    "gt": ">",
    "le": ">",
    "ge": ">=",
    "lt": ">=",
}  # a question and its contrary are the same
_MOST = 8  # values in a table that targets are looked up in


class Comparisons(TorchFunctionMode):
    """Notes the numbers that integers, and the tensors of ``places``, are compared with inside.

    ``places`` says for the address of a tensor's storage which tensor of which input it is.

    >>> target = torch.tensor([1, 2])
    >>> with Comparisons({}) as noted:
    ...     _ = target != 7
    ...     _ = (target < 2) & torch.isin(target, torch.tensor([5]))
    >>> [(each.sign, each.value) for each in noted.questions]
    [('==', 7), ('>=', 2), ('==', 5)]
    """

    def __init__(self, places: Mapping[int, tuple[str, int]]) -> None:
        super().__init__()
        self.places = places
        self.questions: dict[Question, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if name in _SIGNS or name in ("isin", "isnan"):
            with suppress(Exception):  # a subclass of Tensor may answer nothing
                for question in self._asked(name, [*args, *(kwargs or {}).values()]):
                    self.questions.setdefault(question)
        return func(*args, **(kwargs or {}))

    def _asked(self, name: str, operands: Any) -> Iterator[Question]:
        place = self.places.get(operands[0].untyped_storage().data_ptr())
        if place is None and not is_index(operands[0]):
            return
        if name == "isnan":
            yield Question("nan", 0, place)
        elif isinstance(operands[1], torch.Tensor):
            few = operands[1].numel() <= (_MOST if name == "isin" else 1)
            yield from (
                Question(_SIGNS.get(name, "=="), value, place) for value in operands[1].flatten().tolist() if few
            )
        elif isinstance(operands[1], (int, float)):
            yield Question(_SIGNS[name], operands[1], place)
