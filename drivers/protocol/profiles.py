"""Profiles: torch.profiler runs in the workers, and the controller fetches their traces in parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TimedKeys = Sequence[tuple[str, float]]  # what went from worker to worker, each with a time


@dataclass(frozen=True)
class StartProfile:
    """Start torch.profiler, with these activities, by name, and these options. Without activities, with all that are there."""

    activities: tuple[str, ...] | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ProfileStarted:
    """The worker was told so at ``told``, and answered at ``answered``, in seconds of its ``clock``: one for each host."""

    clock: str
    told: float
    answered: float


@dataclass(frozen=True)
class StopProfile:
    """Stop torch.profiler. The answer is a `ProfileStopped`, or None if it does not run."""


@dataclass(frozen=True)
class ProfileStopped:
    """A trace is ready. Its times count from ``began``. ``sends`` has when each send began, ``receives`` when each ended."""

    began: float
    sends: TimedKeys
    receives: TimedKeys


@dataclass(frozen=True)
class GiveTrace:
    """Give the next part of the trace, compressed, with all times ``shift`` seconds later; None if all was given."""

    shift: float
