"""The hooks on the gradients of parameters, as a worker is told them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pippy.drivers.protocol.parameters import TensorLocation
from pippy.drivers.wire.pickling import Pickled
from pippy.ir.run.gradient_hooks import GradientHooks


@dataclass(frozen=True)
class NamedHooks:
    """The hooks of the parameter that has this name in the user's model."""

    name: str
    hooks: GradientHooks


@dataclass(frozen=True)
class WorkerHooks:
    """What one worker is told of the hooks of a model.

    ``places`` has the parameters on the worker that have hooks, and whether some hooks are called after the accumulation.
    ``functions`` has the `NamedHooks` of those whose gradients become complete on this worker, by location; None if none do.
    """

    places: Mapping[TensorLocation, bool] = field(default_factory=dict)
    functions: Pickled | None = None

    def is_like(self, other: "WorkerHooks") -> bool:
        """Whether these are the same hooks, and hold the same objects."""
        one, two = self.functions, other.functions
        return self.places == other.places and (one is two if one is None or two is None else same_bytes(one, two))


def same_bytes(one: Pickled, other: Pickled) -> bool:
    """Whether two objects were pickled alike, with the same numbers in their tensors.

    >>> same_bytes(Pickled(b"", [torch.zeros(1)]), Pickled(b"", [torch.ones(1)]))
    False
    """
    pairs = zip(one.tensors, other.tensors)
    return (
        one.data == other.data and len(one.tensors) == len(other.tensors) and all(torch.equal(*each) for each in pairs)
    )
