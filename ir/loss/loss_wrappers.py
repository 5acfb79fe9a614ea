"""Modules that hold a model and its loss, for a loss that needs more than (output, target)."""

from collections.abc import Callable
from typing import Any

from torch import nn


class LossWrapper(nn.Module):
    """A model and its loss as one module. Derive from it, and write a `forward` that calls both and returns the loss.

    >>> class Regression(LossWrapper):
    ...     def forward(self, x, target, weight):
    ...         return weight * self.loss_fn(self.module(x), target)
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} has no forward; write a forward that calls self.module and self.loss_fn and "
            "returns the loss, or use TrivialLossWrapper"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``, for a model with one input.

    >>> import torch
    >>> TrivialLossWrapper(nn.Identity(), nn.MSELoss())(torch.ones(2), torch.zeros(2))
    tensor(1.)
    """

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        return self.loss_fn(self.module(x), targets)
