"""What the regression tests share: small models, and a check against the plain model."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from pippy import (
    MultiUseParameterConfig,
    Pipe,
    pipe_split,
    pipeline,
)
from tests.comparisons import assert_same_step

REPLICATE, TRANSMIT = MultiUseParameterConfig.REPLICATE, MultiUseParameterConfig.TRANSMIT


def half_square(output, target):
    return ((output - target) ** 2).mean()


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def check(model: nn.Module, *inputs: Any, steps: int = 2, **options: Any) -> Pipe:
    """Train a Pipe and the plain model side by side."""
    plain = copy.deepcopy(model)
    pipe = pipeline(model, half_square, **options)
    target = torch.randn(6, 4)
    for seed in range(steps):
        assert_same_step(pipe, plain, half_square, inputs, target, seed)
    return pipe


X = torch.randn(6, 4, dtype=torch.float64)


def second(function: Callable[[Any, torch.Tensor], Any], base: type[Base] = Base) -> type[Base]:
    """A class of models whose first stage is a layer, and whose second stage is ``function(self, x)``."""

    def forward(self: Base, x: torch.Tensor) -> Any:
        x = self.a(x)
        pipe_split()
        return function(self, x)

    return type("Second", (base,), {"forward": forward, "__module__": function.__module__})  # the file of the model


TwoLayers = second(lambda self, x: self.b(x))
