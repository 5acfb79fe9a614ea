"""Profiles of a driver: torch.profiler runs in all of its workers, and their traces are merged into one file.

driver.profile(path) ─▶ StartProfile ─▶ steps, as they always run ─▶ StopProfile ─▶ GiveTrace, part by part ─▶ the file
"""

import logging
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity

from pippy.drivers.base.errors import DriverError
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.protocol.profiles import GiveTrace, ProfileStarted, StartProfile, StopProfile
from pippy.drivers.report.merged_trace import shifts, trace_file
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.worker.measure.named_work import is_profiled
from pippy.ir.base import source
from pippy.ir.base.brief import brief

_log = logging.getLogger(__name__)
_PATIENCE = 600.0  # seconds that torch.profiler may take to start or to stop: no Python runs in a worker meanwhile
_LOST = "a worker was lost while the profile ran, and its part of the trace with it; profile the steps once more"


@dataclass
class DriverProfile:
    """What `driver.profile` gives: the ``path`` of the trace, and how many ``bytes`` the file has, or 0 before it is there.

    >>> DriverProfile(Path("trace.json"))
    <DriverProfile: trace.json, not written>
    """

    path: Path
    bytes: int = 0

    def __repr__(self) -> str:
        return f"<DriverProfile: {self.path}, {f'{self.bytes / 1e6:.3g} MB' if self.bytes else 'not written'}>"


class WorkerProfiles:
    """The profiles that run on the workers of one driver, for one file. ``holds`` says in words what each worker has."""

    def __init__(
        self, cluster: Cluster, commands: DriverCommands, path: Path, holds: Callable[[], Mapping[int, str]]
    ) -> None:
        self.cluster, self.commands, self.path, self.holds = cluster, commands, path, holds
        self.started: Mapping[int, ProfileStarted] = {}

    @contextmanager
    def running(self, start: StartProfile) -> Iterator[DriverProfile]:
        """Inside, the workers profile what they do. At the end the file is written, or it is said why not."""
        profile = DriverProfile(self.path)
        with self._alone():
            self._start(start)
            try:
                yield profile
            except BaseException as error:
                try:
                    why = self._end()
                except Exception as late:
                    why = str(late)
                if why:
                    error.add_note(f"{self.path} was not written: {why}")
                raise
            why = self._end()
        if why:
            source.warn(f"{self.path} was not written: {why}")
        else:
            profile.bytes = self.path.stat().st_size
            _log.info("%r", profile)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, no other profile runs on the cluster. Raises if one does."""
        with self.cluster.session.lock:
            if self.cluster.profiled is not None:
                raise DriverError(
                    f"the workers of this cluster write a profile to {self.cluster.profiled} already, and torch.profiler "
                    "runs once in a process; end that `with driver.profile(...)` first"
                )
            self._check_processes()
            self.cluster.profiled = self.path
        try:
            yield
        finally:
            self.cluster.profiled = None

    def _check_processes(self) -> None:
        addresses = [self.cluster.session.workers[worker] for worker in self.commands.workers]
        processes = [(each.host, each.pid) for each in addresses]
        if len(set(processes)) < len(processes):
            raise DriverError(
                "several workers are threads of one process here, and torch.profiler runs once in a process; profile on "
                "a cluster of processes: with cluster(2) as workers: ..."
            )
        if (socket.gethostname(), os.getpid()) in processes and is_profiled():
            raise DriverError(
                "a torch.profiler of the script runs, and one of the workers is in the script's process, where it runs "
                "once; end it before driver.profile()"
            )

    def _start(self, start: StartProfile) -> None:
        workers = self.commands.workers
        try:
            self.posted = time.time()
            self.started = self._call(dict.fromkeys(workers, start))
            self.answered = time.time()
        except BaseException:
            with suppress(Exception):  # some may profile already
                self._call(dict.fromkeys(workers, StopProfile()))
            raise

    def _call(self, bodies: Mapping[int, StartProfile | StopProfile]) -> dict[int, Any]:
        with self.cluster.session.patient(_PATIENCE):
            return self.commands.call(bodies)

    def _end(self) -> str:
        """Write the file. Gives the reason if that is not possible."""
        if self.cluster.session.broken or not self.started.keys() <= {*self.commands.workers}:
            return _LOST
        stopped = self._call(dict.fromkeys(self.started, StopProfile()))
        if None in stopped.values():
            return _LOST
        holds, later = self.holds(), shifts(self.started, stopped, self.posted, self.answered)
        names = {worker: f"{self.cluster.workers[worker]}: {holds[worker]}" for worker in sorted(later)}
        with trace_file(self.path, names) as write:
            while later:
                parts = self.commands.call({worker: GiveTrace(shift) for worker, shift in later.items()})
                for worker, part in parts.items():
                    if part is None:
                        del later[worker]
                    else:
                        write(zlib.decompress(part))
        return ""


def profile_options(activities: Any, options: Mapping[str, bool]) -> StartProfile:
    """What the workers are told, from the arguments of `driver.profile`.

    >>> profile_options([ProfilerActivity.CPU], {"with_stack": True})
    StartProfile(activities=('CPU',), options={'with_stack': True})
    """
    names = None
    if activities is not None:
        given = list(activities) if isinstance(activities, Iterable) else [activities]
        if not given or not all(isinstance(each, ProfilerActivity) for each in given):
            raise DriverError(
                f"activities={brief(activities)}: give members of torch.profiler.ProfilerActivity, as in "
                "[ProfilerActivity.CPU], or leave it out for all that the workers have"
            )
        names = tuple(each.name for each in given)
    for name, value in options.items():
        if not isinstance(value, bool):
            raise DriverError(f"{name}={brief(value)}: give True or False")
    return StartProfile(names, options)


def trace_path(path: Any) -> Path:
    """Where a trace can be written: raises now rather than after the steps.

    >>> trace_path("nowhere/trace.json")
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: profile('nowhere/trace.json'): there is no folder nowhere; make it first
    """
    given = f"profile({brief(os.fspath(path) if isinstance(path, os.PathLike) else path)})"
    if not isinstance(path, str | os.PathLike) or not str(path).endswith((".json", ".json.gz")):
        raise DriverError(f"{given}: give a path that ends with .json, or with .json.gz for a compressed file")
    path = Path(path)
    if not path.parent.is_dir():
        raise DriverError(f"{given}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise DriverError(f"{given} is a folder; give the path of a file")
    return path
