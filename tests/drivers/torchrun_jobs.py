"""Processes of a script that torchrun starts, on one host and on several, and the end of them in any case."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

# A python that is told to end as the thread that starts it ends, the tests' own: they may be killed.
_WITH_ITS_STARTER = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
ROOT = Path(__file__).parents[2]
PORT = "29517"


@contextmanager
def started(*arguments, host=None, **environment):
    """A python process, and in any case the end of it, also where the tests are killed.

    torchrun ends its own processes when it is told to end.
    """
    words = [sys.executable, *arguments]
    words = words if host is None else host.command(*words)
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _WITH_ITS_STARTER, str(os.getpid()), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def job(hosts, *arguments, ranks=1, **environment):
    """A script on each of these hosts, in so many processes."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    *(
                        "-m",
                        "tests.drivers.forking_torchrun",
                        "--nnodes",
                        str(len(hosts)),
                        "--nproc-per-node",
                        str(ranks),
                    ),
                    *("--node-rank", str(number), "--master-addr", hosts[0].address, "--master-port", PORT),
                    *arguments,
                    host=host,
                    **environment,
                )
            )
            for number, host in enumerate(hosts)
        ]


def ready(process):
    """The processes of the workers, once they are there."""
    word, *pids = process.stdout.readline().split() or ("nothing",)
    assert word == "ready", process.communicate(timeout=20)
    return [int(pid) for pid in pids]


def tell(process, word):
    """Give the script of a job its next order."""
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
