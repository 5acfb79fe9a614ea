"""Clusters start, answer, notice what is lost, and leave nothing, whatever dies first."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pippy.drivers.base.errors import ClusterError, WorkerLostError
from pippy.drivers.engines.cluster import current_cluster
from pippy.drivers.engines.local.local_cluster import LocalEngine, local_cluster
from pippy.ir.base.errors import PippyWarning
from tests.drivers.processes import (
    assert_no_more_shared_files,
    close_open_cluster,
    hearing_of_deaths,
    shared_files,
    stop,
    strike,
    watched,
    within,
)

ROOT = Path(__file__).parents[3]
LARGE = torch.arange(20_000_000)  # more bytes than shared memory for messages is kept
STAND_IN = "tests.drivers.scripted_worker:Worker"


def start(n=2, *, worker=STAND_IN, **options):
    return local_cluster(n, timeout=20.0, _worker=worker, **options)


@pytest.fixture(scope="module")
def held():
    """The cluster of all tests that do it no harm; those that need another close it."""
    found = []
    yield found
    while found:
        found.pop().close()


@pytest.fixture
def cluster(held):
    if not held or held[0].session.broken:
        close_open_cluster()
        held[:] = [start()]
    return held[0]


def ask(cluster, worker, *message):
    return cluster.session.answer(cluster.session.send(worker, message))


def pids(cluster):
    return [address.pid for address in cluster.session.workers]


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def opened(**options):
    """A cluster that is opened after others: it answers, and leaves no process."""
    with start(**options) as cluster:
        assert current_cluster() is cluster
        assert [ask(cluster, worker, "echo", worker) for worker in range(2)] == [0, 1]
        with watched(*pids(cluster), ask(cluster, 0, "parent")):
            yield cluster
            cluster.close()
    with pytest.raises(ClusterError, match="no cluster is open"):
        current_cluster()


@pytest.mark.usefixtures("alone")
def test_options_reach_the_workers_and_no_directory_is_left(tmp_path, monkeypatch, quick_clusters):
    """With a new Python, and from the process that stands by for the tests, which gives a cluster all that Python would."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_NAME", "a value")
    found = []
    for manner in (quick_clusters.left_out(), nullcontext()):
        with manner, opened(names=("front", "back"), pin=True) as cluster:
            assert list(tmp_path.iterdir()) == []
            assert parent_of(ask(cluster, 0, "parent")) == os.getpid()
            found.append([ask(cluster, worker, "about") for worker in range(2)])
    about = found[0]
    assert [each["name"] for each in about] == ["front", "back"]
    assert all(each["threads"] == 1 and len(each["cores"]) == 1 for each in about)
    assert all(each["environment"]["MALLOC_ARENA_MAX"] == "1" for each in about)
    assert all(each["environment"]["SOME_NAME"] == "a value" and each["folder"] == str(tmp_path) for each in about)
    assert found[1] == about


@pytest.mark.usefixtures("alone")
def test_pinned_workers_that_share_a_core_are_told_of(monkeypatch):
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {core})
    words = rf"may use 1 for 2 workers.*\(core {core}: front, back\); start no more than 1, or leave out pin"
    with pytest.warns(PippyWarning, match=words) as caught, opened(names=("front", "back"), pin=True):
        pass
    assert caught[0].filename == __file__


def test_urgent_is_answered_while_a_worker_is_busy(cluster):
    session = cluster.session
    busy = session.send(0, ("hold",))
    assert session.answer(session.urgent(0, ("await_begun",)))
    assert cluster.dump(timeout=10) == "'worker0': does ('hold',)\n'worker1': waits for a message"
    assert not busy.done
    session.answer(session.urgent(0, ("release",)))
    assert session.answer(busy) == "released"


def test_a_worker_that_computes_longer_than_the_timeout_is_not_lost(cluster, monkeypatch):
    monkeypatch.setattr(cluster.session, "interval", 0.1)
    monkeypatch.setattr(cluster.session, "timeout", 2.0)
    assert ask(cluster, 0, "compute", 2.5) == 2.5


def test_large_messages_leave_no_shared_memory(cluster):
    """They went by RPC, for a ring of shared memory that has grown stays."""
    before = [shared_bytes(pid) for pid in (os.getpid(), *pids(cluster))]
    assert torch.equal(ask(cluster, 0, "echo", LARGE), LARGE)
    assert ask(cluster, 0, "echo", 1) == 1
    for pid, was in zip((os.getpid(), *pids(cluster)), before):
        assert shared_bytes(pid) < was + LARGE.nbytes / 4


def shared_bytes(pid):
    """The bytes of memory that this process shares with others, by its rings."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:pippy" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


class Unloadable:
    def __reduce__(self):
        return pickle.loads, (b"nonsense",)


def test_a_message_that_cannot_be_taken_leaves_no_hole(cluster):
    with pytest.raises(ClusterError, match="could not take a message of type Unloadable"):
        cluster.session.answer(cluster.session.send(0, Unloadable()))
    with pytest.raises(Exception, match="pickle"):
        cluster.session.send(0, ("echo", threading.Lock()))
    assert ask(cluster, 0, "echo", 1) == 1


def test_ctrl_c_breaks_a_wait_and_nothing_else(cluster):
    call = cluster.session.send(0, ("hold",))
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    with within(1.0), pytest.raises(KeyboardInterrupt):
        timer.start()
        cluster.session.answer(call)
    timer.join()
    assert not call.done
    cluster.session.answer(cluster.session.urgent(0, ("release",)))
    assert cluster.session.answer(call) == "released"
    assert ask(cluster, 1, "echo", 1) == 1


def test_a_second_cluster_is_refused_and_a_closed_one_useless(cluster):
    with pytest.raises(ClusterError, match="only one cluster can be open"):
        start(1)
    with pytest.raises(ClusterError, match="a cluster cannot be pickled"):
        pickle.dumps(cluster)
    cluster.close()
    cluster.close()
    with pytest.raises(ClusterError, match="is closed"):
        cluster.session.send(0, ("echo", 1))


@pytest.mark.parametrize("doing", ["idle", "compute"])
def test_a_killed_worker_is_lost_at_once(cluster, doing):
    call = cluster.session.send(1, ("compute", 60.0)) if doing == "compute" else None
    os.kill(pids(cluster)[1], signal.SIGKILL)
    killed = pytest.raises(WorkerLostError, match=r"'worker1'.*killed by SIGKILL")
    with hearing_of_deaths(cluster.session), within(1), killed as lost:
        cluster.session.answer(call or cluster.session.send(1, ("echo", 1)))
    assert lost.value.index == 1
    with pytest.raises(ClusterError, match="lost a worker and cannot go on"):
        cluster.session.send(0, ("echo", 1))


@pytest.mark.parametrize("doing", ["idle", "block"])
def test_a_stopped_worker_is_lost_in_time(cluster, doing):
    call = cluster.session.send(1, ("block",)) if doing == "block" else None
    stop(pids(cluster)[1])
    if doing == "idle":
        first, second = cluster.dump().splitlines()
        assert first == "'worker0': waits for a message"
        assert second.startswith("'worker1': no answer within 1 s")
    cluster.session.timeout = 2.0
    with (
        within(cluster.session.interval + 2 + 1),
        pytest.raises(WorkerLostError, match="left a ping unanswered for 2 s"),
    ):
        cluster.session.answer(call or cluster.session.send(1, ("echo", 1)))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.usefixtures("alone")
def test_the_nursery_dies_or_stops(how):
    with start() as cluster:
        fork_server = ask(cluster, 0, "parent")
        with watched(fork_server, *pids(cluster)):
            strike(fork_server, how)
            if how == signal.SIGKILL:
                with pytest.raises(WorkerLostError):
                    ask(cluster, 0, "block")
            cluster.close()


@pytest.mark.usefixtures("alone")
def test_a_worker_that_cannot_start():
    began = time.monotonic()
    with pytest.raises(
        ClusterError, match=r"worker 'worker1' failed to start:(.|\n)*ValueError: this worker cannot be made"
    ):
        start(worker="tests.drivers.scripted_worker:Broken")
    assert time.monotonic() - began < 30
    with pytest.raises(ClusterError, match=r"fork server failed to start:(.|\n)*No module named 'nowhere'"):
        start(worker="nowhere:Worker")


def test_what_the_fork_server_said_is_heard_where_it_ended_with_a_request_unread():
    """The system tells of that before it gives what was said: "it ended with status 0" was all that the error knew."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.send(b"a request")
    there.send(b"a report")
    there.close()
    with here:
        engine = SimpleNamespace(socket=here)
        assert [LocalEngine._packet(engine) for _ in range(2)] == [b"a report", b""]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"n": 0}, "n=0: give the number"),
        ({"n": True}, "n=True: give the number"),
        ({"n": 2, "threads": 0}, "threads=0: give how many"),
        ({"n": 2, "names": ("a", "a")}, "none twice"),
        ({"n": 2, "names": "ab"}, "list of 2 strings"),
        ({"n": 2, "device": "tpu9"}, "is not a device of torch"),
        ({"n": 2, "device": "cuda:99"}, "there is no device 'cuda:99'"),
        ({"n": 2, "devices": ["cpu"]}, "one device for each"),
        ({"n": 2, "devices": ["cpu"] * 2, "device": "cpu"}, "give only one of the two"),
        ({"n": 2, "timeout": 0}, "timeout=0: give a number of seconds, more than 0"),
        ({"n": 2, "transport": "pigeon"}, "transport must be one of None, 'shared_memory'"),
        ({"n": 2, "transport": "rpc"}, "is for workers that torchrun has started, .*; leave out transport, or start"),
        ({"n": 2, "patience": 2.0}, "patience=2.0: give how many .*, from 0 to 1"),
        ({"n": 2, "patience": -1}, "patience=-1: give how many .*, from 0 to 1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(options, words):
    with pytest.raises(ClusterError, match=words):
        local_cluster(**options)


SCRIPT = f"""
import os, sys
from pippy.drivers.engines.local.local_cluster import local_cluster
cluster = local_cluster(2, _worker="{STAND_IN}")
fork_server = cluster.session.answer(cluster.session.send(0, ("parent",)))
print(fork_server, *[each.pid for each in cluster.session.workers], flush=True)
"""


@contextmanager
def script(text, directory):
    """A script that has printed the processes of its cluster; ends in any case."""
    path = directory / "script.py"
    path.write_text(text)
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory)},
        text=True,
    )
    try:
        yield process, [int(word) for word in process.stdout.readline().split()]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_controller_leaves_nothing(stopped, tmp_path):
    before = shared_files()
    with script(SCRIPT + "sys.stdin.readline()", tmp_path) as (process, processes), watched(*processes):
        if stopped:
            stop(processes[0])
        process.kill()
        process.wait(10)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
    assert_no_more_shared_files(before)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ClusterError, match=r"workers need Linux, and this system is 'darwin'; .*: pipe\(x\)"):
        local_cluster(2)


def test_shared_memory_that_cannot_be_had_is_refused(monkeypatch):
    """What the error advises is tried in test_joined.py."""
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ClusterError, match=r"memfd_create does not work here .*seccomp.*cluster\(n, join=True\)"):
        local_cluster(2)


SMALL = """
import torch
from pippy import PipelineDriverFillDrain, local_cluster, pipeline
from tests.drivers.models import Chain
torch.set_default_dtype(torch.float64)
with local_cluster(2) as cluster:
    x, model = torch.randn(3000, 512), Chain(2, 512)
    driver = PipelineDriverFillDrain(pipeline(model), cluster)
    torch.testing.assert_close(driver.run(2, x), model(x))
    cluster.dump()
"""


def test_a_small_dev_shm_is_enough():
    """RPC's memory and pippy's are memfd's, not files of /dev/shm; in containers that has 64 MB, here 1 MB."""
    inside = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1M tmpfs /dev/shm && exec "$@"', "sh"]
    try:
        able = subprocess.run([*inside, "true"], capture_output=True, timeout=10)
    except OSError as error:
        pytest.skip(f"there is no unshare here: {error}")
    if able.returncode:
        pytest.skip(f"a mount namespace cannot be made here: {able.stderr.decode().strip()}")
    done = subprocess.run([*inside, sys.executable, "-c", SMALL], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
