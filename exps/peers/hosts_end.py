"""Removes the hosts of a process that was killed: a process that waits for that one's end.

    python hosts_end.py PIDFD PREFIX

Hosts are those whose namespaces have names with this PREFIX. Their processes are killed first.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

_MANY = 100  # times, as a process may start another one while its host is emptied


def remove(prefix: str) -> None:
    """Kill what runs on the hosts, and remove them."""
    for name in {line.split()[0] for line in _ip("list") if line.startswith(prefix)}:
        for _ in range(_MANY):
            if not (pids := _ip("pids", name)):
                break
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        _ip("del", name)


def _ip(*words: str) -> list[str]:
    return subprocess.run(["ip", "netns", *words], capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    select.select([int(sys.argv[1])], [], [])
    remove(sys.argv[2])
