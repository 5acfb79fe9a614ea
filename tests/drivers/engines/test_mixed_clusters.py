"""Clusters of torchrun in which some workers share memory, and others are reached by TCP."""

import re

from tests.drivers.processes import listening, watched
from tests.drivers.torchrun_jobs import ROOT, started, tell

SCRIPT = str(ROOT / "tests/drivers/mixed_script.py")
STANDALONE = ["-m", "tests.drivers.forking_torchrun", "--standalone", "--nproc-per-node"]


def lines_until(process, word):
    """The lines before the one that begins with this word, and that line."""
    lines = []
    while not (lines and lines[-1].startswith(word)):
        line = process.stdout.readline()
        assert line, ("\n".join(lines), process.communicate(timeout=20))
        lines.append(line.rstrip("\n"))
    return lines


def test_two_workers_here_and_two_there(tmp_path):
    """TCP carries values from one host to the other, and nothing between workers of one; RPC carries nothing."""
    with started(*STANDALONE, "4", SCRIPT, HOSTS="a a b b", TMPDIR=str(tmp_path)) as process:
        *lines, line = lines_until(process, "ready")
        routes = "\n".join(line for line in lines if line.startswith(("worker", "between")))
        assert re.sub(" on .*?(?=:|$)", "", routes, flags=re.M) == (
            "worker0, worker1: shared memory\nworker2, worker3: shared memory\nbetween these lines: TCP"
        )
        pids = [int(pid) for pid in line.split()[1:]]
        assert not listening(pids), "all are connected"
        assert not list(tmp_path.glob("pippy-*"))
        tell(process, "train")
        with watched(*pids, within=10):
            lines += lines_until(process, "lost")
            process.communicate(timeout=20)
            assert process.returncode != 0
    by_tcp = [tuple(line.split()[1:]) for line in lines if line.startswith("TCP")]
    assert sorted(by_tcp) == [(one, other) for one in "0123" for other in ("23" if one in "01" else "01")]
    by_socket = {line for line in lines if line.startswith("socket")}
    assert by_socket == {"socket 1", "socket 2", "socket 3"}, "worker 0 is in the process of the script"
