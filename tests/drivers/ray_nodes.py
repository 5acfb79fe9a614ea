"""Nodes of a Ray on this machine, of which each counts as a host, in a temporary folder."""

import os
import secrets
import shutil
import signal
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

from tests.drivers.processes import allowing_for

# Ray reads this when it is imported. Its ports are open to other hosts, and who has no token is refused.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # a process that another one started has its token


@contextmanager
def ray_folder():
    """Ray that starts meanwhile, here or in scripts, writes there."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the names of unix sockets are short
    own = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    own |= {"RAY_worker_niceness": "0"}  # what an account that is not root cannot raise again
    own |= {"RAY_TQDM_PATCH_PRINT": "0"}  # or `print` is another function for all tests that follow
    own |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "6"}  # or it takes 20 s
    try:
        with patch.dict(os.environ, own):
            yield folder
    finally:
        for pid in processes_in(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def processes_in(folder):
    """The processes of Ray whose environment or command names this folder, but for this one."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (each / "environ").read_bytes() + (each / "cmdline").read_bytes()
            if folder.encode() in words and int(each.name) != os.getpid():
                found.append(int(each.name))
    return found


class Nodes:
    """A head, and other nodes. The head's host is that of the tests; each other one has a name."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()  # whose processes end also where the tests are killed
        self.others = {}

    def add(self, host="", cpus=2, env=None, **resources):
        self.others[host] = self.cluster.add_node(
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=80 << 20,
            env_vars={"PIPPY_HOST": host, "OMP_NUM_THREADS": "1", **(env or {})},
            resources=resources,
        )

    def remove(self, host):
        """Kill a node, as if its host had lost power."""
        self.cluster.remove_node(self.others.pop(host), allow_graceful=False)

    @property
    def address(self):
        return self.cluster.address

    def close(self):
        self.cluster.shutdown()


def gone(pids, within=10.0):
    """Whether all of these processes end in time."""
    import time

    end = time.monotonic() + allowing_for(within)
    while (left := [pid for pid in pids if _is_there(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return not left


def _is_there(pid):
    with suppress(OSError):
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    return False
