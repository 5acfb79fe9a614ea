"""What a driver has on its workers is held aside while something is tried, and is put back."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HoldState:
    """Hold what the driver has on the worker, but for programs and the like. It goes on without gradients."""


@dataclass(frozen=True)
class PutBackState:
    """Put back what was held: all that was done since then is undone."""
