"""Profiles: torch.profiler runs in the workers, and the controller puts their traces into one file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StartProfile:
    """Start torch.profiler, with these activities, by name, and these options. Without activities, with all that are there."""

    activities: tuple[str, ...] | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class AskTime:
    """Say which clock the worker has, one for each host, and its time in seconds."""


@dataclass(frozen=True)
class StopProfile:
    """Stop torch.profiler. The answer is the trace that it exports, compressed; None if no profiler runs."""
