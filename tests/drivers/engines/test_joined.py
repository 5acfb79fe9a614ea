"""Workers that join from other shells: on this host, and others that count as of another one."""

import os
import re
import signal
import socket
import threading
from contextlib import ExitStack, closing
from functools import partial

import pytest
import torch

from pippy import cluster, local_cluster
from pippy.drivers.base.errors import ClusterError, WorkerLostError
from pippy.drivers.engines.connected_worker import Peers
from pippy.drivers.engines.joined import joined_engine
from pippy.drivers.engines.joined.address import listening_place, made_secret_file, own_address, secret_in
from pippy.drivers.engines.joined.joined_engine import joined_cluster
from pippy.drivers.protocol.commands import ComeIn
from pippy.drivers.wire.messages.doors import Door, Invitation
from pippy.drivers.wire.worker_transport import WorkerTransport
from pippy.ir.base.errors import PippyWarning
from tests.drivers.engines.contract import info_is_logged, keep
from tests.drivers.interrupted_everywhere import descriptors
from tests.drivers.joining_shells import Shells
from tests.drivers.model.recovery.runs import Run
from tests.drivers.processes import attack, close_open_cluster, half_open, until, within
from tests.training.models import assert_same
from tests.training.models import run as run_training

pytestmark = pytest.mark.usefixtures("alone")
STEPS = 6


@pytest.fixture
def shells(quick_clusters, tmp_path):
    made = Shells(quick_clusters, tmp_path)
    yield made
    made.close()


def test_workers_that_join_keep_the_contract(shells):
    """One worker is near, one far, and the spares are neighbours of neither. All begin before anybody listens."""
    all_of_them = [shells.worker(host=host) for host in ("", "b", "c", "d", "e")]
    options = {"join": shells.join, "secret_file": shells.secret_file, "names": ["a", "b"]}
    assert all(each.prints("no cluster answers at") for each in all_of_them)
    with info_is_logged():
        workers = joined_cluster(2, _worker="tests.drivers.scripted_worker:Worker", start_timeout=100.0, **options)
    try:
        assert until(lambda: workers.engine.spares == 3)
        assert workers.routes.groups == ((0,), (1,))
        with info_is_logged():
            keep(workers)
    finally:
        workers.close()
    ends = {0: "ends: the cluster was closed", 1: "the cluster had lost it", 3: ""}
    assert sorted(each.status() for each in all_of_them) == [0, 0, 1, 1, 3]
    assert all(ends[each.status()] in each.printed for each in all_of_them)
    said = "".join(each.printed for each in all_of_them)
    assert "another worker takes its place" in said and "lost it, and goes on without it" in said


@pytest.fixture(scope="module")
def expected():
    torch.set_default_dtype(torch.float64)
    close_open_cluster()
    with local_cluster(3, threads=1) as workers:
        run = Run(workers)
        run.steps(0, STEPS)
        counts = list(workers.session.counts)
        found = run.losses, run.driver.state_dict(), counts
    yield found
    torch.set_default_dtype(torch.float32)


def strangers_at(place, stack):
    """Some do what comes to mind, some say half a greeting, and a thousand stay and say nothing."""
    connect = partial(socket.create_connection, place, timeout=10)
    attack(connect)
    stack.enter_context(half_open(connect, 20))
    for _ in range(1000):
        stranger = stack.enter_context(socket.socket())
        stranger.setblocking(False)
        stranger.connect_ex(place)


def test_a_host_that_shares_no_memory_has_workers_that_join(shells, expected, in_float64, monkeypatch):
    """As the error of a local cluster there advises. All connections are of TCP."""
    for _ in range(3):
        shells.worker(first="del os.memfd_create")
    monkeypatch.delattr(os, "memfd_create")
    with cluster(3, join=shells.join, secret_file=shells.secret_file, timeout=20.0, start_timeout=100) as workers:
        assert sorted(map(len, workers.routes.groups)) == [1, 1, 1]
        run = Run(workers)
        run.steps(0, STEPS)
        assert run.losses == expected[0]


def test_numbers_and_messages_are_those_of_the_local_cluster_and_lost_workers_come_back(
    shells, expected, in_float64, tmp_path, monkeypatch
):
    """A stopped worker, whose place a spare takes; then two with no spare: one joins when the line is printed, one too late."""
    losses, state, counts = expected

    def is_right(run):
        assert run.losses == losses
        for name, value in run.driver.state_dict().items():
            assert torch.equal(value, state[name]), name

    for host in ("", "", "b"):
        shells.worker(host=host)
    with cluster(3, join=shells.join, secret_file=shells.secret_file, timeout=20.0, start_timeout=100) as workers:
        engine = workers.engine
        assert sorted(map(len, workers.routes.groups)) == [1, 2]
        (far,) = next(group for group in workers.routes.groups if len(group) == 1)
        near = 1 if far != 1 else 0
        assert workers.hosts_of([far, near]) == (0, 1) and workers.hosts_of(sorted({0, 1, 2} - {far})) is None
        run = Run(workers)
        with ExitStack() as stack:
            run.step(0)
            strangers_at(("127.0.0.1", int(shells.join.rpartition(":")[2])), stack)
            run.steps(1, STEPS)
            spare = shells.worker()
            assert until(lambda: engine.spares == 1), "a worker joins beside a thousand strangers"
        assert workers.session.counts == counts
        is_right(run)

        run = Run(workers)
        run.steps(0, 2)
        run.save(tmp_path / "run", 2)
        pid = workers.session.workers[near].pid
        run.lose(near, how=signal.SIGSTOP)
        with within(workers.session.timeout + workers.session.interval + 1), pytest.raises(WorkerLostError):
            run.step(2)
        assert run.driver.recover()["step"] == 2
        assert workers.session.workers[near].pid == spare.process.pid and engine.spares == 0
        assert next(each for each in shells.all if each.process.pid == pid).status() == -signal.SIGKILL
        run.steps(2, 4)

        said = joined_engine.say

        def start_one(text):
            said(text)
            if "can join from any shell" in text:
                assert text.startswith(f"a worker in the place of {workers.workers[far]!r}") and shells.join in text
                shells.worker(host="c")

        run.protect(4)
        with monkeypatch.context() as patched:
            patched.setattr(joined_engine, "say", start_one)
            run.lose(far)
            with within(2), pytest.raises(WorkerLostError, match="its process has ended"):
                run.step(4)
            assert run.driver.recover()["step"] == 4

        engine.timeout = 0.1
        run.lose(near)
        with pytest.raises(WorkerLostError):
            run.step(4)
        with pytest.raises(
            ClusterError,
            match=r"0 of 1 joined within 0\.1 s; start 1 worker more.*secret; the workers .*: call recover\(\) again",
        ):
            run.driver.recover()
        with pytest.warns(PippyWarning, match="the run goes on with the workers that are left"):
            assert run.driver.recover(fewer=True)["step"] == 4
        assert workers.gone == {near}
        run.protect(4)
        engine.timeout = 100.0
        shells.worker()
        assert run.driver.recover(workers=3)["step"] == 4 and not workers.gone
        run.steps(4, STEPS)
        is_right(run)
    assert {each.status() for each in shells.all} == {0, -signal.SIGKILL}


def test_a_training_goes_on_by_itself(shells, in_float64, tmp_path):
    """Two workers die, one after the other. Spares take their places, or workers that join meanwhile."""
    for _ in range(3):
        shells.worker()
    killed = []

    def kill(report):
        if report.step in (4, 7) and report.step not in killed:
            killed.append(report.step)
            shells.worker()
            os.kill(workers.session.workers[report.step % 2].pid, signal.SIGKILL)

    with cluster(2, join=shells.join, secret_file=shells.secret_file, start_timeout=100.0) as workers:
        undisturbed = run_training(workers, None)
        again = run_training(workers, tmp_path / "run", callbacks=kill, max_recoveries=2)
    assert_same(again, undisturbed)
    assert again[0].recoveries == 2 and killed == [4, 7]


OTHER = """
from pippy.drivers.base import versions
versions.versions = lambda: {"Python": "2.7"}
from pippy.drivers.wire.messages import doors
doors.versions = versions.versions
"""


def test_wrong_workers_are_told_why_and_the_cluster_goes_on_waiting(shells, tmp_path, capfd):
    """Another secret, another device than there is, another version of pippy."""
    another = str(made_secret_file(tmp_path / "another"))
    secret, device, version = (
        shells.worker("--secret-file", another),
        shells.worker("--device", "cuda:7"),
        shells.worker(first=OTHER),
    )

    def come_when_they_are_gone():
        assert secret.status() == device.status() == version.status() == 1
        shells.worker()

    thread = threading.Thread(target=come_when_they_are_gone)
    thread.start()
    with cluster(1, join=shells.join, secret_file=shells.secret_file, start_timeout=100.0) as workers:
        assert len(workers) == 1
    thread.join()
    told = f"the cluster there has another secret (compare the files: {another})"
    assert told in secret.printed or f"{shells.join} has closed the connection" in secret.printed
    assert "there is no device 'cuda:7'" in device.printed and "joined the cluster" not in device.printed
    refused = "it runs Python 3.*, and this process Python 2.7; install the same versions on each host"
    assert re.search(f"Error: the cluster at {shells.join} refuses this worker: {refused}", version.printed)
    said = capfd.readouterr().err
    assert re.search(
        "pippy: a worker from 127.0.0.1 was refused: it runs Python 2.7, and this process Python 3.*", said
    )
    assert shells.all[-1].status() == 0


def test_a_cluster_that_too_few_join_says_how_many_came_and_from_where(shells):
    early = shells.worker()
    assert early.prints("no cluster answers at")
    before = descriptors()
    with within(5), pytest.raises(ClusterError) as refused:
        cluster(2, join=shells.join, secret_file=shells.secret_file, start_timeout=2.0)
    assert descriptors() == before
    said = str(refused.value)
    assert said.startswith(f"1 of 2 joined within 2 s (1 on {socket.gethostname()}); start 1 worker more, in any shell")
    assert f"pippy worker --join {shells.join} --secret-file {shells.secret_file}; or give cluster() a larger" in said
    assert early.status() == 1 and "ends: the cluster did not start: 1 of 2 joined" in early.printed


SCRIPT = """
import os, sys, time
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1), os.dup2(log, 2)
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import pippy
with pippy.cluster(2, join=sys.argv[2], secret_file=sys.argv[3]) as workers:
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        (signal.SIGKILL, 1, "ends: the controller has ended without closing the cluster"),
        (signal.SIGINT, 0, "ends: the cluster was closed"),
    ],
)
def test_workers_and_spares_end_with_the_controller(shells, how, status, words):
    workers = [shells.worker(host=host) for host in ("", "b", "b")]
    script = shells.run(SCRIPT, shells.join, shells.secret_file)
    assert script.prints("ready"), script.printed
    assert all(each.prints("joined the cluster") for each in workers), "\n".join(each.printed for each in workers)
    with within(3):
        os.kill(script.process.pid, how)
        assert [each.status() for each in workers] == [status] * 3, "\n".join(each.printed for each in workers)
    assert all(words in each.printed for each in workers), "\n".join(each.printed for each in workers)
    assert script.status() == -how


REFUSED = [
    (
        {"join": 29400, "address": "auto"},
        "address='auto' is an option of engine=\"ray\", and this cluster is on engine",
    ),
    ({"secret_file": "x"}, "secret_file='x' is an option of join=True, and this cluster is on engine 'local'"),
    ({"join": True, "engine": "ray"}, "join=True is another way than engine='ray'"),
    (
        {"join": True, "threads": 2},
        "each worker says it for itself, by an option of pippy worker: --threads; leave out threads",
    ),
    (
        {"join": True, "pin": True},
        "pin=True is an option of cluster(n), and this cluster is on engine 'joined'; leave out pin",
    ),
    (
        {"join": "198.51.100.1:0"},
        "cannot listen at port 0 of 198.51.100.1: Cannot assign requested address; give a port of",
    ),
    ({"join": "nowhere.invalid:0"}, "this host does not know the name 'nowhere.invalid'"),
    ({"join": "29400"}, "'29400' is no address; write HOST:PORT"),
    ({"join": 70000}, "join says where workers join: True, a port"),
    ({"join": True, "names": ["a"]}, "names must name each of the 2 workers"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_bad_options_are_refused_before_anybody_can_join(tmp_path, options, words):
    secret = {} if "secret_file" in options or "join" not in options else {"secret_file": tmp_path / "secret"}
    with within(2), pytest.raises(ClusterError) as refused:
        cluster(2, **options, **secret)
    assert words in str(refused.value)


def test_ranks_of_torchrun_wait_for_no_workers_of_their_own(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ClusterError, match=r"join=True, and this is rank 1 of 2 processes .*start the script with python"
    ):
        cluster(2, join=True)


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ClusterError, match=f"port {port} of 127.0.0.1: Address already in use; give a .*, and join=True"
        ):
            cluster(2, join=f"127.0.0.1:{port}", secret_file=tmp_path / "secret")


def test_a_secret_file_is_made_for_its_owner_alone_and_refused_if_others_can_read_it(tmp_path):
    path = made_secret_file(tmp_path / "new" / "secret")
    secret = secret_in(path)
    assert len(secret) == 64 and secret_in(made_secret_file(path)) == secret
    assert [each.stat().st_mode & 0o777 for each in (path, path.parent)] == [0o600, 0o700]
    assert os.listdir(path.parent) == ["secret"]
    path.chmod(0o640)
    with pytest.raises(ClusterError, match=f"chmod 600 {path}"):
        secret_in(path)
    path.chmod(0o600)
    path.write_text("too short\n")
    with pytest.raises(ClusterError, match="has 9 bytes, where a secret has 16 to 4096; remove the file"):
        secret_in(path)
    with pytest.raises(ClusterError, match=r"there is no secret file .*copy it to this host"):
        secret_in(tmp_path / "none")
    with pytest.raises(ClusterError, match="cannot be read: Is a directory"):
        secret_in(tmp_path)
    with pytest.raises(ClusterError, match=r"cannot be made: .*give another path as secret_file="):
        made_secret_file(path / "below")


def test_a_worker_that_gets_no_connection_with_another_says_so():
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = free.getsockname()
    peers = Peers(0, ["a", "b"], "127.0.0.1", 5.0, WorkerTransport(0))
    with pytest.raises(
        OSError, match=rf"no connection with worker 'b' at 127.0.0.1, port {place[1]}: .*refused\. .*firewall"
    ):
        peers.answer(ComeIn(1, Invitation(*place, bytes(32))))


def test_where_workers_join():
    own = own_address()
    assert listening_place(True) == (own, 0, own) and listening_place(29400) == (own, 29400, own)
    assert listening_place("0.0.0.0:29400") == ("0.0.0.0", 29400, own)
    assert listening_place("[::1]:7") == ("::1", 7, "::1")
    assert listening_place("localhost:7")[1:] == (7, "localhost")
    with closing(Door(own, None, print, 5.0)):
        pass
