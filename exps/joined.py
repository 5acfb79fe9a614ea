"""How long does a recovery take where workers join: with a spare, and where a worker is started first?

Command: ``python -m exps.joined --rounds 5``

A run of three workers, with AdamW, protects its state in the memory of neighbours. In each round a worker is killed, and the
next step finds it lost. It prints, for both cases, the seconds until `driver.run` has raised, and those of `driver.recover`:
the quickest, the middle and the slowest. The workers are processes of `pippy worker --join`, each started as from a shell.
"""

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pippy.drivers.base.errors import WorkerLostError
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.joined.joined_engine import joined_cluster
from tests.drivers.model.recovery.runs import Run

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 3


@dataclass
class WorkerProcess:
    """A process, on a host that counts as another one if it has a name, and what it prints."""

    process: subprocess.Popen[bytes]
    host: str
    log: Path

    @property
    def printed(self) -> str:
        """What it has printed."""
        return self.log.read_text()


class WorkerProcesses:
    """Processes of `pippy worker`, each as of a shell. With ``again`` one that ends is followed by another, as in a deployment.

    ``environment`` is what they have besides that of this process.
    """

    def __init__(self, folder: str, again: bool = False, environment: dict[str, str] | None = None) -> None:
        self.folder, self.secret_file, self._environment = folder, f"{folder}/secret", environment or {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.join = f"127.0.0.1:{free.getsockname()[1]}"
        self.all: list[WorkerProcess] = []
        self.started = 0
        self.again, self._over = again, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def start(self, host: str = "") -> None:
        """Start one."""
        words = ["-m", "pippy", "worker", "--join", self.join, "--secret-file", self.secret_file, "--threads", "1"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PIPPY_HOST": host} | self._environment
        log = Path(self.folder, f"worker{self.started}.log")
        self.started += 1
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *words], env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self.all.append(WorkerProcess(process, host, log))

    def close(self) -> None:
        """End them all; those of a cluster that is closed have ended."""
        self._over.set()
        self._thread.join()
        for each in self.all:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(5)
            each.process.kill()
            each.process.wait()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            for each in [each for each in self.all if each.process.poll() is not None]:
                self.all.remove(each)
                if self.again:
                    self.start(each.host)


@contextmanager
def joined(
    workers: int, spares: int = 0, again: bool = False, timeout: float = 5.0
) -> Iterator[tuple[Cluster, WorkerProcesses]]:
    """A cluster that so many workers and spares have joined, and their processes."""
    with tempfile.TemporaryDirectory() as folder:
        processes = WorkerProcesses(folder, again)
        try:
            for _ in range(workers + spares):
                processes.start()
            given = {"join": processes.join, "secret_file": processes.secret_file}
            with joined_cluster(workers, timeout=timeout, start_timeout=300.0, **given) as cluster:  # type: ignore[arg-type]
                yield cluster, processes
                processes.again = False
        finally:
            processes.close()


def recovery(run: Run, cluster: Cluster, step: int, worker: int) -> tuple[float, float]:
    """The seconds until a killed worker is known to be lost, and those of the recovery."""
    os.kill(cluster.session.workers[worker].pid, signal.SIGKILL)
    start = time.monotonic()
    try:
        run.step(step)
    except WorkerLostError:
        lost = time.monotonic()
        run.driver.recover()
        return lost - start, time.monotonic() - lost
    raise AssertionError("the step has not failed")


def wait_for_spare(cluster: Cluster) -> None:
    """Wait until a worker has joined that is not needed."""
    while not cluster.engine.spares:  # type: ignore[attr-defined]
        time.sleep(0.05)


def measured(rounds: int, spare: bool) -> list[tuple[float, float]]:
    """The seconds of each round."""
    found = []
    with joined(WORKERS, spares=int(spare)) as (cluster, processes):
        run = Run(cluster)
        for number in range(rounds):
            run.step(number)
            run.protect(number)
            if spare:
                wait_for_spare(cluster)
            else:
                processes.start()
            found.append(recovery(run, cluster, number + 1, number % WORKERS))
            if spare and number + 1 < rounds:
                processes.start()
    return found


def line(name: str, seconds: Sequence[float]) -> str:
    """A line of the table.

    >>> line("recover", [3.0, 1.0, 2.0])
    'recover      1.00     2.00     3.00 s'
    """
    return f"{name:<8} {min(seconds):>8.2f} {statistics.median(seconds):>8.2f} {max(seconds):>8.2f} s"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for spare in (True, False):
        found = measured(rounds, spare)
        print("with a spare" if spare else "a worker is started as one is lost", f"({rounds} rounds)")
        print(line("lost", [lost for lost, _ in found]))
        print(line("recover", [recovered for _, recovered in found]), flush=True)


if __name__ == "__main__":
    main()
