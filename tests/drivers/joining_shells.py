"""Workers that join a cluster, each in a process as of a shell of its own, and a place at which no cluster listens yet."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

from pippy.drivers.engines.joined.address import made_secret_file
from tests.drivers.processes import allowing_for

# The command, with its output in a file. What comes first is for a worker that is another than the rest.
_COMMAND = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1), os.dup2(log, 2)
exec(sys.argv[2])
from pippy.cli import main
sys.argv = ["pippy", "worker", *sys.argv[3:]]
main()
"""


class Shell:
    """A process, and what it has printed."""

    def __init__(self, process, log):
        self.process, self.log = process, log

    @property
    def printed(self):
        return self.log.read_text() if self.log.exists() else ""

    def prints(self, words, within=20.0):
        """Whether it prints this in time."""
        end = time.monotonic() + allowing_for(within)
        while words not in self.printed and time.monotonic() < end:
            time.sleep(0.01)
        return words in self.printed

    def status(self, within=20.0):
        """Its exit status, when it has ended."""
        try:
            return self.process.wait(allowing_for(within))
        except subprocess.TimeoutExpired:
            return f"it goes on: {self.printed}"


class Shells:
    """Starts processes from one that stands by. ``join`` is where their cluster is to listen."""

    def __init__(self, stand_by, folder):
        self.stand_by, self.folder, self.all = stand_by, folder, []
        self.secret_file = str(made_secret_file(folder / "secret"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.join = f"127.0.0.1:{free.getsockname()[1]}"

    def run(self, code, *arguments, host=""):
        log = self.folder / f"{len(self.all)}.log"
        process = self.stand_by.popen(
            [sys.executable, "-c", code, str(log), *arguments],
            pass_fds=[],
            env=os.environ | {"PIPPY_HOST": host},
            cwd=self.folder,
        )
        self.all.append(Shell(process, log))
        return self.all[-1]

    def worker(self, *options, host="", first=""):
        given = ["--join", self.join, "--secret-file", self.secret_file, "--threads", "1"]
        return self.run(_COMMAND, first, *given, *options, host=host)

    def close(self):
        for each in self.all:
            if each.process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(each.process.pid, signal.SIGKILL)
                each.process.wait()
