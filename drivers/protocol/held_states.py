"""A driver's state on its workers is set aside while a step is tried, and is put back after it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HoldState:
    """Set aside the driver's state on the worker, without its programs. The driver goes on without gradients."""


@dataclass(frozen=True)
class PutBackState:
    """Put back the state that was set aside: all changes since then are undone."""
