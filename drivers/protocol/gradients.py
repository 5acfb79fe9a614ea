"""The gradients on the workers, and which worker adds up those of copies."""

from dataclasses import dataclass

from pippy.drivers.protocol.parameters import TensorLocation


@dataclass(frozen=True)
class ReplicatedParameter:
    """A parameter with copies: the user's name, and the worker and location of each copy.

    Copies are in the order of the replicas of the pipeline, and within a replica in that of the stages."""

    name: str
    copies: tuple[tuple[int, TensorLocation], ...]


@dataclass(frozen=True)
class GradientBucket:
    """Parameters with copies on the same workers. The worker ``owner`` adds up their gradients together, as a part of the
    ``sum`` of a program."""

    owner: int
    parameters: tuple[ReplicatedParameter, ...]
    sum: str = ""

    @property
    def workers(self) -> list[int]:
        """The workers that have copies."""
        return list(dict.fromkeys(worker for worker, _ in self.parameters[0].copies))


@dataclass(frozen=True)
class FetchGradients:
    """Give the gradients of the parameters at these locations."""

    locations: tuple[TensorLocation, ...]


@dataclass(frozen=True)
class ReduceGradients:
    """Add up the gradients of replicated parameters, unless that was done."""


@dataclass(frozen=True)
class GradientNorms:
    """Give the norm of each gradient at these locations. With ``reduce``, add up those of replicated parameters first."""

    locations: tuple[TensorLocation, ...]
    norm_type: float
    reduce: bool


@dataclass(frozen=True)
class ScaleGradients:
    """Multiply all gradients by a number."""

    factor: float


@dataclass(frozen=True)
class ClampGradients:
    """Clamp every element of all gradients between -limit and limit, after adding up those of copies if need be."""

    limit: float
    reduce: bool
