"""Watches one controller of the campaign: when its faults are noticed, how it ends, and what it leaves behind."""

import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from exps.injected.job import Job, cut_tcp, job
from exps.injected.kinds import ANYWHERE, BY_THE_WATCHER, TORCHRUN, bound
from exps.injected.left import files_left, marked, outlast
from exps.injected.ray_place import RayPlace
from exps.injected.training import Report
from tests.drivers.processes import allowing_for, wanting_a_core

PATIENCE = 60.0  # seconds in which a controller that lives says something; on a busy machine more
GRACE = {
    "local": 5.0,
    "ray": 10.0,
    "joined": 5.0,
    "ranks": 45.0,
    "hosts": 45.0,
}  # torchrun kills what does not end, as it is stopped, after 30 s


def watch(place: str, seed: int, kinds: list[str]) -> Iterator[Report]:
    """Run a controller with some faults, and check what it leaves behind."""
    mark = f"{os.getpid()}-{seed}"
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as errors:
        wrong = False
        with job(place, seed, kinds, mark, directory, errors) as started:
            for report in _Watch(place, kinds, started, mark, random.Random(seed)).reports():
                if not report.wrong and report.seconds > allowing_for(bound(report.kind)):
                    report.wrong = f"took {report.seconds:.1f} s, and may take {allowing_for(bound(report.kind)):.1f}"
                wrong = wrong or bool(report.wrong)
                yield report
        if left := files_left(directory, shared):
            yield Report(kinds[-1], 0.0, f"files: {left}")
        if wrong:
            errors.seek(0)
            print(errors.read()[-20_000:], file=sys.stderr, flush=True)


def busy() -> float:
    """How much longer all may take than on a machine that has nothing else to do."""
    return min(4.0, max(1.0, wanting_a_core()))


def patience() -> float:
    """How long a controller may say nothing."""
    return PATIENCE * busy()


class _Watch:
    """One job. ``told`` is how many of its faults are over."""

    def __init__(self, place: str, kinds: list[str], started: Job, mark: str, rng: random.Random) -> None:
        self.place, self.kinds, self.job, self.mark, self.rng = place, kinds, started, mark, rng
        self.told, self.pid, self.struck = 0, 0, 0.0
        self.workers: list[int] = []
        self.over = False  # though not all of its faults were had

    def reports(self) -> Iterator[Report]:
        """What happened, and at the end what is left."""
        try:
            for line in self._lines():
                yield from self._heard(line)
            status = self.job.wait(patience())
            yield from self._end(status)
        except (TimeoutError, subprocess.TimeoutExpired):
            for pid in {self.pid, *(self.workers if self.place in TORCHRUN else [])} & set(marked(self.mark)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)  # they write what their threads are at
            time.sleep(1.0)
            kind = self.kinds[min(self.told, len(self.kinds) - 1)]
            yield Report(kind, PATIENCE, f"hang after {self.kinds[: self.told]}")
        away = self.job.away
        left = outlast(partial(marked, self.mark) if away is None else away.workers, GRACE[self.place] * busy())[1]
        if left:
            yield Report(self.kinds[-1], 0.0, f"orphans: {left}")

    def _heard(self, line: dict[str, Any]) -> Iterator[Report]:
        if "pid" in line:
            self.pid = line["pid"]
            if self.kinds == [ANYWHERE]:
                yield self._interrupted()
        elif "workers" in line:
            self.workers = line["workers"]
            if isinstance(self.job.away, RayPlace) and not {*self.workers} <= {*self.job.away.workers()}:
                yield Report(self.kinds[0], 0.0, "the workers are not those that are looked for in the end")
        elif "begins" in line:
            self.struck = time.monotonic()
            if line["begins"] in BY_THE_WATCHER:
                time.sleep(self.rng.uniform(0, 0.1))
                self.struck = time.monotonic()
                self._strike(line["begins"])
        else:
            report = Report(**line)
            self.told, self.over = self.told + 1, report.ends
            if report.kind in BY_THE_WATCHER:
                report.seconds = report.ended - self.struck
            yield report
            if report.kind == "stop worker" and self.place in (*TORCHRUN, "joined"):
                for pid in marked(self.mark):  # it goes on, and must find that it has nothing to do any more
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)

    def _strike(self, kind: str) -> None:
        if kind == "kill controller":
            os.kill(self.pid, signal.SIGKILL)
        elif kind == "kill host":
            self.job.on[1].kill()
        elif isinstance(self.job.away, RayPlace):
            self.job.away.strike(kind)
        elif kind == "cut host":
            self.job.on[1].cut()
        else:
            cut_tcp([self.pid, *self.workers], self.job.on)

    def _interrupted(self) -> Report:
        """Ctrl-C for a controller that does everything, at any instant; for torchrun and all ranks, too."""
        self.told = 1
        time.sleep(self.rng.uniform(0.0, 3.0))
        start = time.monotonic()
        self.job.signal(signal.SIGINT)
        status = self.job.wait(patience())
        right = self.place in TORCHRUN or status in (1, 130, -signal.SIGINT)
        return Report(ANYWHERE, time.monotonic() - start, "" if right else f"ended with status {status}")

    def _end(self, status: int) -> Iterator[Report]:
        """A controller that was killed says no more, and torchrun ends one that has lost a worker."""
        if self.over or self.told >= len(self.kinds):  # the last may have been told, and what it left
            return
        kind = self.kinds[self.told]
        ends_job = kind == "kill controller" or (
            self.place in TORCHRUN and kind in ("kill worker", "kill host", "cut tcp")
        )
        if self.struck and ends_job and self.told == len(self.kinds) - 1:
            yield Report(kind, 0.0)
        else:
            yield Report(kind, 0.0, f"the controller ended with status {status}")

    def _lines(self) -> Iterator[dict[str, Any]]:
        """What the controller says. Raises TimeoutError if it says nothing for too long."""
        stream = self.job.processes[0].stdout
        assert stream is not None
        read = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while True:
                if not selector.select(patience()):
                    raise TimeoutError
                if not (more := os.read(stream.fileno(), 1 << 16)):
                    return
                *lines, read = (read + more).split(b"\n")
                yield from (json.loads(line) for line in lines if line.startswith(b"{"))
