"""Whether an optimizer updates a parameter without the others of its group, of which workers have some each.

The class is tried on one parameter: alone, beside another, and behind another. A class that draws random numbers is not tried
in another place, where it draws others.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import OptimizerError
from pippy.drivers.worker.gradients.worker_optimizer import made_optimizer

_SCALES = (1e-3, 1.0, 1e3)  # of the gradients: some optimizers mix parameters only if their gradients are large


def check_separable(optimizer_class: type, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise if the update of a parameter depends on the other parameters of its group.

    If it cannot run on parameters that are made up, nothing is known, and nothing is raised.

    >>> check_separable(torch.optim.AdamW, (), {"lr": 0.1})
    """
    if optimizer_class.__name__ == "LBFGS":
        raise OptimizerError("LBFGS cannot be used, because it calls the model again within a step; use another class")
    with torch.random.fork_rng(devices=[]):
        try:
            tried = partial(_updated, optimizer_class, args, options)
            alone, beside, behind = tried([0]), tried([0, 1]), tried([1, 0])
            draws = not _are_close(alone, tried([0], seed=1))
        except Exception:  # made-up parameters need not suit it
            return
    if not draws and _are_close(alone, beside) and not _are_close(alone, behind):
        raise OptimizerError(
            f"{optimizer_class.__name__} cannot be used: its update of a parameter depends on the place of the parameter in "
            "its group, and a worker has a part of the group only, so that places differ there. Let the optimizer read what "
            'differs from an option of the group, as in param_groups=[{"params": "first.*", "lr": 0.01}, ...], or from an '
            "attribute of the parameter, which the parameters on the workers have, too"
        )
    if not _are_close(alone, beside):
        raise OptimizerError(
            f"{optimizer_class.__name__} cannot be used: its update of a parameter depends on the other parameters "
            "of the group (on their norm, for example), and each worker only has a part of the group. Do that part "
            "separately (driver.clip_grad_norm_ computes the norm over the whole model), or use a class that "
            "updates each parameter alone"
        )


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def _updated(
    optimizer_class: type, args: Sequence[Any], options: Mapping[str, Any], places: Sequence[int], seed: int = 0
) -> torch.Tensor:
    """The first of two parameters after a few steps of an optimizer that has those with these numbers, in this order."""
    numbers = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 4, generator=numbers)) for _ in range(2)]
    optimizer = made_optimizer(optimizer_class, args, options, [{"params": [parameters[place] for place in places]}])
    for step, scale in enumerate(_SCALES):
        torch.manual_seed(10 * seed + step)  # what the optimizer draws itself is alike
        for number, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(10 * step + number)
            parameter.grad = torch.randn(4, 4, generator=generator) * scale
        optimizer.step()
    return parameters[0].detach()
