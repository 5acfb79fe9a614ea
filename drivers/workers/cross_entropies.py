"""How the cross entropies are called that a loss calls."""

import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pippy.drivers.batches.loss_weights import IGNORED
from pippy.drivers.batches.target_questions import Question


class CrossEntropies(TorchFunctionMode):
    """Notes the arguments of the cross entropies and NLL losses that are called inside.

    >>> with CrossEntropies() as noted:
    ...     _ = F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), ignore_index=1)
    >>> noted.ignored()
    [Question(sign='==', value=1, place=None)]
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Mapping[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss):
            with suppress(TypeError):
                self.calls.append(inspect.signature(func).bind(*args, **(kwargs or {})).arguments)
        return func(*args, **(kwargs or {}))

    def ignored(self) -> list[Question]:
        """Which targets the means leave out."""
        found = [each.get("ignore_index", IGNORED) for each in self.calls if _averages(each)]
        return [Question("==", value) for value in dict.fromkeys(found)]

    def classes(self) -> list[Question]:
        """Whether targets are of the class that weighs least, but more than nothing, and of the one that weighs most."""
        weights = [
            each["weight"].detach().double()
            for each in self.calls
            if _averages(each) and each.get("weight") is not None
        ]
        positive = [torch.where(weight > 0, weight, math.inf) for weight in weights]
        classes = [each for weight, least in zip(weights, positive) for each in (least.argmin(), weight.argmax())]
        return [Question("==", int(each)) for each in classes]


def _averages(entropy: Mapping[str, Any]) -> bool:
    return entropy.get("reduction", "mean") == "mean"
