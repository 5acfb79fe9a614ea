"""A process that stands by with torch imported: the clusters of the tests are forked from it, in place of a new Python each.

To start Python and import torch takes more than two seconds of a core, and most tests of clusters are about what comes after.
A cluster's fork server begins here with all that a new process would get: the code, the arguments, the environment, the
folder, the files, the niceness, a session of its own, and the tests' process for its parent. `StandBy.left_out` is for a test
of the start itself. Scripts that tests run start their clusters as ever.

    tests ◀─socket─▶ stand-by ──fork──▶ a process that ends at once ──fork──▶ fork server of a cluster
      ▲                                                                           │
      └────────────── its parent, as the nearest that adopts orphans ─────────────┘
"""

import contextlib
import ctypes
import fcntl
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from unittest.mock import patch

from pippy.drivers.engines.connected_worker import load
from pippy.drivers.engines.local import local_cluster
from pippy.drivers.engines.local.local_cluster import WORKER

_PR_SET_CHILD_SUBREAPER = 36
_MOST_FILES = 200  # in one message

# Each worker would import this for itself, with its first module of the tests.
ADVANCED = ("pippy.api",)


class StandBy:
    """Stands for ``subprocess.Popen`` where a local cluster starts its fork server. The process starts when it is needed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()

    def close(self) -> None:
        if self.process is not None:
            self.socket.close()
            self.process.wait()

    @contextlib.contextmanager
    def left_out(self):
        """Clusters start as they do outside of tests."""
        with patch.object(local_cluster, "subprocess", subprocess):
            yield

    def popen(self, command, *, pass_fds, env, cwd=None, stdin=subprocess.DEVNULL, start_new_session=False):
        """For ``python -P -c code`` and ``python -m module``, with arguments."""
        numbers = [1, 2, *pass_fds]
        _, option, code, *arguments = (each for each in command if each != "-P")
        if option == "-m":
            # Python finds the module in the folder, too
            code = (
                f"import runpy, sys; sys.path.insert(0, {str(cwd or os.getcwd())!r}); "
                f"runpy.run_module({code!r}, run_name='__main__', alter_sys=True)"
            )
        request = (code, ["-c", *arguments], numbers, env, str(cwd or os.getcwd()), os.nice(0), start_new_session)
        answers, answer = os.pipe()
        try:
            with self._asking, _adopting():
                if (
                    self.process is None or self.process.poll() is not None
                ):  # as tests of Ray end all that began in its folder
                    self._start(env)
                socket.send_fds(self.socket, [pickle.dumps(request)], [answer, *numbers])
                os.close(answer)
                return Child(int(os.read(answers, 64)))
        finally:
            os.close(answers)

    def _start(self, env) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=env | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )


class Child:
    """As much of ``subprocess.Popen`` as is used."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def wait(self, timeout=None):
        if self.returncode is None:
            with os.fdopen(os.pidfd_open(self.pid), "rb", 0) as ended:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a fork server", timeout)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


@contextlib.contextmanager
def standing_by(*modules):
    """Local clusters of this process start so, and the processes of these modules."""
    stand_by = StandBy()
    stand_in = types.SimpleNamespace(**vars(subprocess) | {"Popen": stand_by.popen})
    try:
        with contextlib.ExitStack() as patches:
            for module in (local_cluster, *modules):
                patches.enter_context(patch.object(module, "subprocess", stand_in))
            yield stand_by
    finally:
        stand_by.close()


@contextlib.contextmanager
def _adopting():
    """Orphans that this process has brought forth become its children."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def serve(requests: socket.socket) -> None:
    """Fork a process for each request, until the tests end. Such a process becomes what was asked for, and does not return."""
    load(WORKER)
    for module in ADVANCED:
        importlib.import_module(module)
    while requests.recv(1, socket.MSG_PEEK):
        request, (answer, *files), *_ = socket.recv_fds(requests, 1 << 20, _MOST_FILES)
        adopted, adopt = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            os.close(adopt)
            os.read(adopted, 1)
            *asked, new_session = pickle.loads(request)
            if new_session:
                os.setsid()
            os.write(answer, str(os.getpid()).encode())
            for each in (adopted, answer, requests.detach()):
                os.close(each)
            become(files, *asked)
        os.waitpid(between, 0)
        for each in (adopted, adopt, answer, *files):
            os.close(each)


def become(files, code, arguments, numbers, env, folder, niceness) -> None:
    """Run the code of ``python -c`` as a process does that was started with these files, environment and folder."""
    os.nice(niceness - os.nice(0))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    beyond = max(*numbers, *files) + 1
    held = [fcntl.fcntl(each, fcntl.F_DUPFD, beyond) for each in files]
    os.closerange(3, beyond)
    for each, number in zip(held, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = arguments
    exec(code, main.__dict__)
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # at once
