"""What a controller leaves behind: its processes, their descriptors, files and shared memory."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "PIPPY_FAULTS"  # in the environment of a controller and of all that it starts


def marked(mark: str) -> list[int]:
    """The processes that a controller started, and itself."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def outlast(processes: Callable[[], list[int]], seconds: float) -> tuple[float, list[int]]:
    """How long the processes of a controller go on after its end, and those that do so for longer than they may."""
    start = time.monotonic()
    while (left := processes()) and time.monotonic() < start + seconds:
        time.sleep(0.02)
    took = time.monotonic() - start
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return took, left


def files_left(directory: str, shared: set[str]) -> list[str]:
    """The files in a controller's own directory, and those of ours in shared memory that were not there before."""
    torch_keeps = ("torchinductor", "torchelastic")  # its cache; the folder for logs of a job that failed
    files = [name for name in os.listdir(directory) if not name.startswith(torch_keeps)]
    return files + [name for name in set(os.listdir("/dev/shm")) - shared if "pippy" in name]


class Held:
    """What the workers hold: file descriptors and maps of shared memory. They may not grow with the faults."""

    def __init__(self, pids: list[int]) -> None:
        self.before = {pid: held(pid) for pid in pids if pid != os.getpid()}

    def grown(self) -> str:
        """What has grown beyond the connections with each other worker, RPC's among them, and shared memory for them."""
        peers = len(self.before) + 1
        now = {pid: held(pid) for pid in self.before}
        return "; ".join(
            f"worker {pid} had {before} descriptors and maps, and has {now[pid]}"
            for pid, before in self.before.items()
            if now[pid][0] > before[0] + 8 * peers or now[pid][1] > before[1] + 4 * peers
        )


def held(pid: int) -> tuple[int, int]:
    """How many file descriptors a process has, and how many maps of shared memory."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len(os.listdir(f"/proc/{pid}/fd")), sum("memfd:" in line for line in maps)
