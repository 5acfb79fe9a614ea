"""A model to try: how it is made, and what it is called with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Candidate:
    """A model, in float64, and the arguments of a call, by name.

    Without a ``loss_fn`` the model returns its loss, alone or beside other things.
    """

    make: Callable[[], nn.Module]
    arguments: Callable[[], dict[str, Any]]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    returns_only_a_loss: bool = False
    fixed_batch: bool = False  # what it computes for a row depends on how many rows there are

    def model(self) -> nn.Module:
        """The same weights each time."""
        torch.manual_seed(0)
        return self.make().double()


def words(rows: int = 4, length: int = 8, among: int = 20) -> torch.Tensor:
    """Token ids, the same each time."""
    return torch.randint(among, (rows, length), generator=torch.Generator().manual_seed(rows + length))


def numbers(*shape: int) -> torch.Tensor:
    """Random numbers, the same each time."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def rows_of(arguments: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The arguments of a smaller call."""
    return {name: value[begin:end] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
