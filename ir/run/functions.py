"""The functions of pippy's own that the graphs of stages call."""

from typing import Any

import torch

from pippy.ir.trees import map_tensors


def set_grad_mode(enabled: bool) -> bool:
    """Turn gradients on or off, as a step of a graph; gives the mode before."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    return before


def check_tensor(value: Any) -> None:
    """What tracing answered to `isinstance(x, ...)` must be so when the graph runs."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"forward asked for the type of a value, and tracing took it for a tensor; it is a {type(value).__name__}. Ask for "
            "something that is known while tracing, or keep the code whole with a tracer whose is_leaf_module says True"
        )


def by_mode(training: bool, in_training: Any, in_eval: Any) -> Any:
    """The value for the mode that the model is in.

    >>> by_mode(False, 0.1, 0.0)
    0.0
    """
    return in_training if training else in_eval


def own_copy(value: Any) -> Any:
    """The same value in memory of its own, so that it can be changed in place; gradients flow through.

    >>> x = torch.zeros(2)
    >>> own_copy(x).add_(1), x
    (tensor([1., 1.]), tensor([0., 0.]))
    """
    return map_tensors(torch.clone, value)
