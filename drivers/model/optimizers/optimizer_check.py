"""Whether an optimizer updates each parameter without the others, so that each worker may have some of the parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pippy.drivers.base.errors import OptimizerError

_SCALES = (1e-3, 1.0, 1e3)  # of the gradients: some optimizers mix parameters only if their gradients are large


def check_separable(optimizer_class: type, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise if the update of a parameter depends on the other parameters of its group.

    The class is tried on one parameter, and on the same one beside another. If it cannot run on these, nothing is known, and
    nothing is raised.

    >>> check_separable(torch.optim.AdamW, (), {"lr": 0.1})
    """
    if optimizer_class.__name__ == "LBFGS":
        raise OptimizerError("LBFGS cannot be used, because it calls the model again within a step; use another class")
    with torch.random.fork_rng(devices=[]):
        try:
            alone, beside = (_updated(optimizer_class, args, options, count) for count in (1, 2))
        except Exception:  # made-up parameters need not suit it
            return
    if not torch.allclose(alone, beside, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise OptimizerError(
            f"{optimizer_class.__name__} cannot be used: its update of a parameter depends on the other parameters "
            "of the group (on their norm, for example), and each worker only has a part of the group. Do that part "
            "separately (driver.clip_grad_norm_ computes the norm over the whole model), or use a class that "
            "updates each parameter alone"
        )


def _updated(optimizer_class: type, args: Sequence[Any], options: Mapping[str, Any], count: int) -> torch.Tensor:
    """A parameter after a few steps of an optimizer that has ``count`` parameters."""
    numbers = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 4, generator=numbers)) for _ in range(2)][:count]
    optimizer: Optimizer = optimizer_class([{"params": parameters}], *args, **options)
    for step, scale in enumerate(_SCALES):
        torch.manual_seed(step)  # what the optimizer draws itself is alike
        for number, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(10 * step + number)
            parameter.grad = torch.randn(4, 4, generator=generator) * scale
        optimizer.step()
    return parameters[0].detach()
