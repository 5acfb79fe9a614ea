"""A launcher for another system, in one file: here the system starts processes of this host, by a command.

The workers join, so all else is the engine's: who comes in, who takes which place, who is lost. A launcher submits jobs, and
ends them. For Slurm the command begins with `srun --overlap -n 1`, and for Kubernetes with `kubectl run`.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import partial

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.arguments import checked_names
from pippy.drivers.engines.cluster import Cluster, check_none_open, opened
from pippy.drivers.engines.hub.members import Member
from pippy.drivers.engines.joined.joined_engine import JoinedEngine, JoinedLaunch
from pippy.drivers.engines.local.local_cluster import WORKER
from pippy.drivers.session.calls import Address

SYSTEM = (sys.executable, "-m", "pippy", "worker")  # what the other system is given to run


class LaunchedEngine(JoinedEngine):
    """Workers that join because a job was submitted for each of them."""

    def __init__(self, launch: JoinedLaunch) -> None:
        super().__init__(launch)
        self.jobs: list[subprocess.Popen[bytes]] = []

    def _fill(self, workers: Iterable[int], deadline: float, spares: int = 0) -> dict[int, Address]:
        """Submit a job for each place that nobody waits for."""
        places = list(workers)
        for _ in range(len(places) - self.spares):
            self.submit()
        return super()._fill(places, deadline, spares)

    def submit(self) -> None:
        """Have the system start one more worker."""
        given = ["--join", self.where, "--secret-file", str(self.launch.secret_file), "--threads", "1"]
        self.jobs.append(subprocess.Popen([*SYSTEM, *given], stdin=subprocess.DEVNULL))

    def check_left(self, workers: Sequence[int], present: Sequence[Member], left: float) -> None:
        """Raise as soon as a job that nobody has ended is over: its worker will not come."""
        failed = [job.args for job in self.jobs if job.poll()]
        if failed or left <= 0:
            raise ClusterError(f"{len(present)} of {len(workers)} workers have come; jobs that failed: {failed}")

    def kill(self, members: Sequence[Member], why: str) -> None:
        """End lost workers, and their jobs."""
        super().kill(members, why)
        lost = [job for job in self.jobs if job.pid in [member.place["pid"] for member in members]]
        for job in lost:
            self.jobs.remove(job)
            job.wait()

    def end_all(self, lost: str | None) -> None:
        """End all workers, and the jobs of those that have not come."""
        super().end_all(lost)
        for job in self.jobs:
            job.terminate()
            job.wait()


def launched_cluster(n: int, secret_file: str | os.PathLike[str], worker: str = WORKER) -> Cluster:
    """A cluster of ``n`` workers that the system starts."""
    check_none_open()
    names, place = checked_names(n, None), "127.0.0.1:0"
    launch = JoinedLaunch(worker=worker, names=names, join=place, secret_file=secret_file, timeout=5.0, patience=None)
    return opened(partial(LaunchedEngine, launch), 5.0, 60.0)
