"""What a process may have around its cluster: forks, a directory, blocked signals, no standard streams, freed memory."""

import os
import pickle
import resource
import signal
import socket
import sys

import pytest
import torch

from pippy.drivers.base.errors import ClusterError, WorkerLostError
from pippy.drivers.base.process import keep_freed_memory
from pippy.drivers.engines.local import fork_server
from pippy.drivers.engines.local.fork_server import Died
from pippy.drivers.engines.local.local_cluster import _directory, local_cluster
from tests.drivers.processes import Forked, hearing_of_deaths

STAND_IN = "tests.drivers.scripted_worker:Worker"

pytestmark = pytest.mark.usefixtures("alone")


def start(n):
    return local_cluster(n, timeout=20.0, _worker=STAND_IN)


def ask(cluster, worker, *message):
    return cluster.session.answer(cluster.session.send(worker, message))


def test_a_fork_of_the_script_is_refused_its_cluster_and_keeps_nothing_alive():
    """Two processes read each other's answers at one socket, and waited for ever; a fork that lived on, as the workers of
    a DataLoader do, kept the end of the cluster waiting for two seconds."""
    reading, writing = os.pipe()

    def use():
        os.close(writing)
        with pytest.raises(
            ClusterError, match=rf"belongs to process {os.getppid()}, from which .* forked; .* open another"
        ):
            ask(cluster, 0, "echo", 1)
        cluster.close()  # ends nothing here
        os.read(reading, 1)  # and lives until the other is done

    cluster = start(2)
    fork = Forked(use)
    os.close(reading)
    assert ask(cluster, 1, "echo", 2) == 2
    cluster.close()
    os.close(writing)
    assert fork.ended() == (0, "")
    assert cluster.engine.fork_server.returncode == 0  # nobody had to kill it


def test_a_cluster_of_a_fork_without_streams_whose_signals_are_blocked_beside_files_named_as_modules(
    tmp_path, quick_clusters
):
    """Workers failed without standard output; modules of the working directory came before Python's own, also if they are
    another user's; where SIGCHLD was blocked, nobody knew how a worker had died."""
    for module in ("pickle", "socket", "torch"):
        (tmp_path / f"{module}.py").write_text("raise ValueError('a file of the working directory')")

    def use():
        sys.stdin = sys.stdout = sys.stderr = None
        os.closerange(0, 3)
        os.chdir(tmp_path)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with quick_clusters.left_out(), start(1) as own:
            assert ask(own, 0, "about")["output"] == [os.devnull] * 3
            assert [os.readlink(f"/proc/self/fd/{number}") for number in range(3)] == [os.devnull] * 3
            os.kill(own.session.workers[0].pid, signal.SIGKILL)
            with hearing_of_deaths(own.session), pytest.raises(WorkerLostError, match="killed by SIGKILL"):
                ask(own, 0, "block")

    with start(1):  # which the fork has, too, and may still open its own
        status, said = Forked(use).ended()
        assert status == 0, said


def test_workers_start_though_the_directory_was_deleted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _directory() is None  # they begin where this process is
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert _directory() == "/"


def test_a_fork_server_that_ends_as_it_begins(monkeypatch, quick_clusters):
    """The error was that of a socket."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        quick_clusters.left_out(),
        pytest.raises(ClusterError, match=r"forked from ended .*status 1.* while workers started"),
    ):
        start(1)


@pytest.mark.parametrize("counts, words", [((4, 4), "killed by SIGKILL"), ((4, 5), "memory ran out")])
def test_a_worker_that_is_killed_when_memory_runs_out(monkeypatch, counts, words):
    """The system kills such a process with SIGKILL, as anybody may; it counts those."""
    said = iter(counts)
    monkeypatch.setattr(fork_server, "killed_for_memory", lambda: next(said))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        server = object.__new__(fork_server.ForkServer)
        server.controller, server.killed_for_memory = there, fork_server.killed_for_memory()
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(1)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        server.children = {pid: (3, 0)}
        server._reap()
        died = pickle.loads(here.recv(1 << 16))
    assert (died.index, died.status) == (3, -signal.SIGKILL)
    assert words in died.how
    assert ("dmesg" in died.how) == (counts[1] > counts[0])


def test_a_signal_without_a_name():
    assert Died(0, -(signal.SIGRTMIN + 1)).how == f"killed by signal {signal.SIGRTMIN + 1}"


SIZE = 1 << 25


def usual_faults():
    """The page faults of a tensor, at most, in half of the cases: the first ones find no piece that is large enough."""
    found = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(SIZE // 4)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sorted(found)[len(found) // 2]


def test_later_tensors_take_no_page_faults():
    """In a process of its own: its settings last as long as it does."""

    def body():
        keep_freed_memory()
        os.write(2, str(usual_faults()).encode())

    status, found = Forked(body).ended()
    assert status == 0 and int(found) < 16
