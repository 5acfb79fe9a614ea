"""Runs torch.profiler in a worker, and gives its trace in parts."""

import tempfile
import time
import zlib
from itertools import islice
from pathlib import Path
from typing import IO

import torch
from torch.profiler import ProfilerActivity, profile

from pippy.drivers.protocol.profiles import GiveTrace, ProfileStarted, ProfileStopped, StartProfile, StopProfile
from pippy.drivers.wire.messages.stderr_filter import StderrFilter
from pippy.drivers.worker.measure.recorder import clock
from pippy.drivers.worker.measure.trace_events import WorkerEvents, events_of, shifted

LINES = 20_000  # events in a part: about 5 MB of text, which 0.5 MB hold when they are compressed
_SAYS = b"SyncActivityProfilerHandler.cpp"  # on standard error, whenever a profiler starts or stops


class WorkerProfiler:
    """The profiles of one driver on one worker, one after another.

    >>> profiler = WorkerProfiler(0, torch.device("cpu"))
    >>> profiler.stop(StopProfile(), 1) is None
    True
    """

    def __init__(self, worker: int, device: torch.device) -> None:
        self.worker, self.device = worker, device
        self._profile: profile | None = None
        self._lines: IO[str] | None = None
        self._stderr = StderrFilter(_SAYS)

    def start(self, body: StartProfile, number: int) -> ProfileStarted:
        """Begin to profile what this thread does."""
        told = time.time()
        self.close()
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self.device.type == "cuda")]
        if body.activities is not None:
            activities = [getattr(ProfilerActivity, name) for name in body.activities]
        self.began = time.time_ns()
        started = profile(activities=activities, **body.options)
        self._stderr.start()
        try:
            started.start()
        finally:
            self._stderr.stop()
        self._profile = started
        return ProfileStarted(clock(), told, time.time())

    def stop(self, body: StopProfile, number: int) -> ProfileStopped | None:
        """End the profile, and have its events ready."""
        stopped = self._stop()
        if stopped is None:
            return None
        with tempfile.TemporaryDirectory(prefix="pippy-profile-") as folder:
            path = Path(folder) / "trace.json"
            stopped.export_chrome_trace(str(path))
            del stopped
            self._lines = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 # closed when all was given
            with path.open(encoding="utf-8", errors="replace") as file:
                result = WorkerEvents(self.worker, self.began, self._lines).take(*events_of(file))
        self._lines.seek(0)
        return result

    def give(self, body: GiveTrace, number: int) -> bytes | None:
        """The next part of the trace: events with commas between them."""
        lines = [] if self._lines is None else list(islice(self._lines, LINES))
        if not lines:
            self.close()
            return None
        return zlib.compress(",\n".join(shifted(each, body.shift * 1e6) for each in lines).encode(), level=1)

    def close(self) -> None:
        """Drop what is profiled."""
        self._stop()
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _stop(self) -> profile | None:
        stopped, self._profile = self._profile, None
        if stopped is not None:
            self._stderr.start()
            try:
                stopped.stop()
            finally:
                self._stderr.stop()
        return stopped
