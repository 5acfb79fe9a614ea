"""Profiles of a driver: torch.profiler runs in all of its workers, and their traces are merged into one file.

driver.profile(path) ─▶ StartProfile ─▶ AskTime ─▶ steps, as they always run ─▶ StopProfile ─▶ the file

Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open it.
"""

import gzip
import json
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
from pippy.drivers.protocol.steps import AskTime, StartProfile, StopProfile
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.worker.measure.profiler import is_profiled
from pippy.drivers.worker.measure.recorder import clock
from pippy.ir.base import source
from pippy.ir.base.public_calls import check_flag
from pippy.ir.base.readable import brief

Event = dict[str, Any]
_log = logging.getLogger(__name__)
_PROCESSES = 1000  # more than a worker has
_KEPT = ("thread_name", "thread_sort_index", "process_labels")
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
        self.ahead: Mapping[int, float] = {}  # by how many seconds the clock of each worker that profiles is

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
            self._call(dict.fromkeys(workers, start))
            posted = time.time()
            times = self._call(dict.fromkeys(workers, AskTime()))
            middle = (posted + time.time()) / 2
        except BaseException:
            with suppress(Exception):  # some may profile already
                self._call(dict.fromkeys(workers, StopProfile()))
            raise
        ahead = {clock(): 0.0}  # by how many seconds each clock is, to half the time of a message there and back
        self.ahead = {at: ahead.setdefault(name, told - middle) for at, (name, told) in sorted(times.items())}

    def _call(self, bodies: Mapping[int, StartProfile | AskTime | StopProfile]) -> dict[int, Any]:
        with self.cluster.session.patient(_PATIENCE):
            return self.commands.call(bodies)

    def _end(self) -> str:
        """Write the file. Gives the reason if that is not possible."""
        if self.cluster.session.broken or not self.ahead.keys() <= {*self.commands.workers}:
            return _LOST
        traces = self._call(dict.fromkeys(self.ahead, StopProfile()))
        if None in traces.values():
            return _LOST
        holds = self.holds()
        names = {worker: f"{self.cluster.workers[worker]}: {holds[worker]}" for worker in self.ahead}
        write_trace(self.path, names, traces, self.ahead)
        return ""


def write_trace(path: Path, names: Mapping[int, str], traces: Mapping[int, bytes], ahead: Mapping[int, float]) -> None:
    """Write the compressed traces of workers to one file, from their clocks that are some seconds ``ahead``.

    The file is there when all is written, and else it is as it was before.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with gzip.open(part, "wt", 5) if path.suffix == ".gz" else part.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(_merged(names, traces, ahead)):
                file.write(",\n" * (number > 0) + json.dumps(event))
            file.write("\n]}\n")
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _merged(names: Mapping[int, str], traces: Mapping[int, bytes], ahead: Mapping[int, float]) -> Iterator[Event]:
    """The events of all workers, with times that begin with 0. Each worker is a process, and so is each of its GPUs."""
    read = {worker: json.loads(zlib.decompress(traces[worker])) for worker in sorted(names)}
    starts = {worker: trace.get("baseTimeNanoseconds", 0) / 1e3 - ahead[worker] * 1e6 for worker, trace in read.items()}
    times = (starts[worker] + each["ts"] for worker, trace in read.items() for each in _timed(trace))
    first = min(times, default=0.0)
    for worker, trace in read.items():
        processes = dict[int, int]()
        for each in _timed(trace):
            number = processes.setdefault(each["pid"], worker * _PROCESSES + len(processes) + 1)
            if "id" in each:
                each["id"] = f"{worker}/{each['id']}"
            yield each | {"pid": number, "ts": round(each["ts"] + starts[worker] - first, 3)}
        for number in processes.values():
            yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": names[worker]}}
            yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}
        for each in trace["traceEvents"]:  # the names of threads, and which process is a GPU
            if each["ph"] == "M" and each["name"] in _KEPT and each["pid"] in processes:
                yield each | {"pid": processes[each["pid"]]}


def _timed(trace: Event) -> Iterator[Event]:
    """The events of a trace that have a time, but for those of the profiler itself, whose processes have no number."""
    return (each for each in trace["traceEvents"] if each["ph"] != "M" and isinstance(each["pid"], int))


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
        check_flag(name, value, DriverError)
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
