"""Workers that join the controllers of a campaign, each in a process as of a shell of its own."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from exps.injected.left import MARK
from exps.joined import WorkerProcesses

HOSTS = ("", "b", "")  # of the workers that stand by: the second one shares no memory with the others
PLACE = "PIPPY_FAULTS_JOIN"  # in the environment of a controller: where it listens, and the path of the secret


class JoinedPlace:
    """Processes that join whatever cluster listens. One that has ended is followed by another."""

    def __init__(self, folder: str, mark: str) -> None:
        self.processes = WorkerProcesses(folder, again=True, environment={MARK: mark, "OMP_NUM_THREADS": "1"})
        self.environment = {PLACE: f"{self.processes.join} {self.processes.secret_file}"}
        for host in HOSTS:
            self.processes.start(host)

    def workers(self) -> list[int]:
        """The processes that have joined a cluster. From now on, none follows one that has ended."""
        self.processes.again = False
        return [each.process.pid for each in self.processes.all if "joined the cluster" in each.printed]


@contextmanager
def joined_place(mark: str, errors: IO[str]) -> Iterator[JoinedPlace]:
    """Start the workers. At the end, those are killed that have joined nothing, and what all have printed is in ``errors``."""
    with tempfile.TemporaryDirectory() as folder:
        place = JoinedPlace(folder, mark)
        try:
            yield place
        finally:
            place.processes.again = False
            for each in place.processes.all:
                each.process.kill()
            place.processes.close()
            for number in range(place.processes.started):
                with open(f"{folder}/worker{number}.log") as printed:
                    shutil.copyfileobj(printed, errors)


def options(place: str) -> dict[str, object]:
    """Those of a cluster that the workers join; ``place`` is what the environment has."""
    join, secret_file = place.split(" ", 1)
    return {"join": join, "secret_file": secret_file, "start_timeout": 200.0}
