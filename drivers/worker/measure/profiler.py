"""Runs torch.profiler in a worker, and names in its traces what the worker does: its commands, and their instructions.

    Step                    a command
      F2.0                  an instruction of it
        aten::linear        what torch notes itself
      send relu.0 to 1

Without a profiler nothing is named.
"""

import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.protocol.steps import AskTime, StartProfile, StopProfile
from pippy.drivers.wire.messages.stderr_filter import StderrFilter
from pippy.drivers.worker.measure.calls import BoundCall
from pippy.drivers.worker.measure.recorder import clock

_SAYS = b"SyncActivityProfilerHandler.cpp"  # on standard error, whenever a profiler starts or stops


class WorkerProfiler:
    """The profiles of one driver on one worker, one after another.

    >>> profiler = WorkerProfiler(torch.device("cpu"))
    >>> profiler.stop(StopProfile(), 1) is None
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._profile: profile | None = None
        self._stderr = StderrFilter(_SAYS)

    def start(self, body: StartProfile, number: int) -> None:
        """Begin to profile what this thread does."""
        self.close()
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self.device.type == "cuda")]
        if body.activities is not None:
            activities = [getattr(ProfilerActivity, name) for name in body.activities]
        started = profile(activities=activities, **body.options)
        self._stderr.start()
        try:
            started.start()
        finally:
            self._stderr.stop()
        self._profile = started

    def time(self, body: AskTime, number: int) -> tuple[str, float]:
        """The worker's clock, and what it shows."""
        return clock(), time.time()

    def stop(self, body: StopProfile, number: int) -> bytes | None:
        """End the profile, and give its trace."""
        stopped = self.close()
        if stopped is None:
            return None
        with tempfile.TemporaryDirectory(prefix="pippy-profile-") as folder:
            path = Path(folder) / "trace.json"
            stopped.export_chrome_trace(str(path))
            return zlib.compress(path.read_bytes(), level=1)

    def close(self) -> profile | None:
        """Stop the profiler that runs, and give it."""
        stopped, self._profile = self._profile, None
        if stopped is not None:
            self._stderr.start()
            try:
                stopped.stop()
            finally:
                self._stderr.stop()
        return stopped


def named(work: Any) -> AbstractContextManager[Any]:
    """A context around a command, or around one of its instructions. What is for the profile is no part of it."""
    if not is_profiled() or isinstance(work, AskTime | StopProfile):
        return nullcontext()
    return record_function(str(work) if isinstance(work, Instruction) else type(work).__name__)


def is_profiled() -> bool:
    """Whether torch.profiler runs in this thread."""
    return torch.autograd._profiler_enabled()


def naming(order: Sequence[Instruction], code: Sequence[BoundCall]) -> Sequence[BoundCall]:
    """The code of a program's instructions, each inside of its name.

    >>> naming([], [])
    []
    """
    return [(_named(each, handle), operands) for each, (handle, operands) in zip(order, code)]


def _named(instruction: Instruction, handle: Callable[..., None]) -> Callable[..., None]:
    def run(*operands: Any) -> None:
        with record_function(str(instruction)):
            handle(*operands)

    return run
