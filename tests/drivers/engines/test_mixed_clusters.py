"""Clusters in which some workers share memory, and others are reached by RPC only."""

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
    """RPC carries values from one host to the other where TCP cannot, and nothing between workers of one."""
    with started(*STANDALONE, "4", SCRIPT, HOSTS="a a b b", TMPDIR=str(tmp_path)) as process:
        *lines, line = lines_until(process, "ready")
        routes = "\n".join(line for line in lines if line.startswith(("worker", "between")))
        assert re.sub(" on .*?(?=:|$)", "", routes, flags=re.M) == (
            "worker0, worker1: shared memory\nworker2, worker3: shared memory\nbetween these lines: TCP"
        )
        pids = [int(pid) for pid in line.split()[1:]]
        assert not listening(pids), "all are connected, and a value by RPC connects nobody"
        assert not list(tmp_path.glob("pippy-*"))
        tell(process, "train")
        with watched(*pids, within=10):
            lines += lines_until(process, "lost")
            process.communicate(timeout=20)
            assert process.returncode != 0
    by_rpc = {tuple(line.split()[1:]) for line in lines if line.startswith("RPC")}
    values = {(rank, to) for rank, kind, to in by_rpc if kind == "deliver"}
    assert values == {("1", "worker2"), ("2", "worker1"), ("3", "worker1")}, (
        "no port of worker 1 can be reached, as behind a firewall"
    )
    by_tcp = [tuple(line.split()[1:]) for line in lines if line.startswith("TCP")]
    assert sorted(by_tcp) == [("0", "2"), ("0", "3"), ("2", "0"), ("3", "0")]
    by_socket = {line for line in lines if line.startswith("socket")}
    assert by_socket == {"socket 1"}, "worker 0 is in the process of the script"
    assert {to for _, kind, to in by_rpc if kind == "post"} == {"worker2", "worker3"}
