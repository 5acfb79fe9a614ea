"""Starts a controller of the campaign: on this host, under torchrun, or under torchrun on two hosts."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from exps.injected.joined_place import JoinedPlace, joined_place
from exps.injected.kinds import TORCHRUN
from exps.injected.left import MARK
from exps.injected.ray_place import RayPlace, ray_place
from exps.peers.hosts import Host, hosts

ROOT = Path(__file__).parents[2]
_PORT = "29517"  # of the first host, which is nobody else's


@dataclass
class Job:
    """The processes that were started, of which the first one's output is the controller's; and where others are."""

    processes: "list[subprocess.Popen[str]]"
    on: list[Host]
    away: RayPlace | JoinedPlace | None = None

    def signal(self, number: int) -> None:
        """Send a signal to all that a terminal would send it to."""
        for each in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, number)

    def wait(self, seconds: float) -> int:
        """The status of the first that failed. Raises subprocess.TimeoutExpired."""
        return max((each.wait(seconds) for each in self.processes), key=abs)


@contextmanager
def job(place: str, seed: int, kinds: list[str], mark: str, directory: str, errors: IO[str]) -> Iterator[Job]:
    """Start one. At the end its first processes are killed."""
    rng = random.Random(seed)
    played = ["-m", "exps.faults", "--play", str(seed), place, *kinds]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    with ExitStack() as stack:
        on: list[Host] = []
        away: RayPlace | JoinedPlace | None = None
        if place == "ray":
            away = stack.enter_context(ray_place(mark))
        elif place == "joined":
            away = stack.enter_context(joined_place(mark, errors))
        if place not in TORCHRUN:
            commands = [[sys.executable, *played]]
        elif place == "ranks":
            commands = [[*torchrun, "--standalone", "--nproc-per-node", str(rng.choice([3, 4])), *played]]
        else:
            on = stack.enter_context(hosts(2))
            each = ["--nnodes", "2", "--nproc-per-node", str(rng.choice([1, 2]))]
            meeting = ["--master-addr", on[0].address, "--master-port", _PORT]
            commands = [
                host.command(*torchrun, *each, "--node-rank", str(number), *meeting, *played)
                for number, host in enumerate(on)
            ]
        started = Job([], on, away)
        environment = os.environ | {MARK: mark, "TMPDIR": directory, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment |= {} if away is None else away.environment
        stack.callback(_end, started)
        for number, command in enumerate(commands):
            started.processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=errors if number else subprocess.PIPE,
                    stderr=errors,
                    cwd=ROOT,
                    env=environment,
                    text=True,
                    start_new_session=True,
                )
            )
        yield started


def _end(started: Job) -> None:
    for each in started.processes:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
        each.communicate()


def cut_tcp(workers: list[int], on: list[Host]) -> None:
    """Break the connections of TCP among these processes, as `ss -K` does."""
    run = on[0].command if on else lambda *words: list(words)
    shown = subprocess.run(run("ss", "-Htnp", "state", "established"), capture_output=True, text=True).stdout
    rows = [line.split() for line in shown.splitlines() if any(f"pid={pid}," in line for pid in workers)]
    ends = {(row[2], row[3]) for row in rows}
    for here, there in ends:
        among = not there.endswith(f":{_PORT}") if on else (there, here) in ends
        if among:
            subprocess.run(run("ss", "-K", "src", here, "dst", there), capture_output=True, check=True)
