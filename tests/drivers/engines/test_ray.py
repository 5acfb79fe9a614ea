"""Clusters on Ray: on nodes of this machine, of which one is this host, and others count as hosts of their own."""

import dataclasses
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pippy import cluster, local_cluster
from pippy.drivers.base.errors import ClusterError, WorkerLostError
from pippy.drivers.engines import open_cluster
from pippy.drivers.engines.ray import ray_engine
from pippy.drivers.engines.ray.ray_cluster import ray_cluster
from tests.drivers.engines.contract import info_is_logged, keep
from tests.drivers.model.recovery.runs import Run
from tests.drivers.processes import close_open_cluster, until, within
from tests.drivers.ray_nodes import Nodes, gone, processes_in, ray_folder
from tests.drivers.torchrun_jobs import started

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "pippy-compiler[ray]"')
pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def folder():
    close_open_cluster()
    with ray_folder() as path:
        yield path


@pytest.fixture(scope="module")
def nodes(folder):
    made = Nodes()
    try:
        made.add(here=2, run=1)
        made.add("b", far=2, run=2)
        yield made
    finally:
        made.close()


def pids(workers):
    return [each.pid for each in workers.session.workers]


def test_ray_keeps_the_contract(nodes):
    """One worker is here, and one far."""
    options = {"names": ["a", "b"], "threads": 1, "strategy": "STRICT_SPREAD", "address": nodes.address}
    with info_is_logged():
        workers = ray_cluster(2, _worker="tests.drivers.scripted_worker:Worker", **options)
    try:
        assert workers.routes.groups == ((0,), (1,))
        processes = pids(workers)
        with info_is_logged():
            keep(workers)
        assert gone([*processes, *pids(workers)]) and not ray.is_initialized()
    finally:
        workers.close()


STEPS = 5


@pytest.fixture(scope="module")
def expected(folder):
    torch.set_default_dtype(torch.float64)
    close_open_cluster()
    with local_cluster(3, threads=1) as workers:
        run = Run(workers)
        run.steps(0, STEPS)
        counts = list(workers.session.counts)
        found = run.losses, run.driver.state_dict(), counts
    yield found
    torch.set_default_dtype(torch.float32)


def test_numbers_and_messages_are_those_of_the_local_cluster_and_lost_workers_come_back(
    nodes, expected, in_float64, tmp_path
):
    """A stopped worker, and then a node with two workers; what takes the node's place has joined meanwhile."""
    losses, state, counts = expected
    with cluster(3, engine="ray", address=nodes.address, threads=1, resources={"run": 1}, timeout=20.0) as workers:
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids(workers)} == {os.getpriority(os.PRIO_PROCESS, 0)}
        names = [[workers.workers[at] for at in group] for group in workers.routes.groups]
        assert sorted(map(len, names)) == [1, 2]
        host = socket.gethostname()
        lines = [f"{', '.join(group)} on {host}{': shared memory' * (len(group) > 1)}" for group in names]
        assert str(workers.routes).splitlines() == [*lines, "between these lines: TCP"]
        far = [at for group in workers.routes.groups if len(group) == 2 for at in group]
        run = Run(workers)
        run.steps(0, STEPS)
        assert run.losses == losses and workers.session.counts == counts
        for name, value in run.driver.state_dict().items():
            assert torch.equal(value, state[name]), name

        run = Run(workers)
        run.steps(0, 2)
        run.save(tmp_path, 2)
        stopped = pids(workers)[far[0]]
        run.lose(far[0], how=signal.SIGSTOP)
        with within(workers.session.timeout + workers.session.interval + 1), pytest.raises(WorkerLostError):
            run.step(2)
        assert run.driver.recover()["step"] == 2
        assert gone([stopped])
        run.steps(2, 3)

        workers.session.timeout = 20.0
        nodes.add("c", far=2, run=2)
        before = pids(workers)
        nodes.remove("b")
        assert gone([before[at] for at in far])
        with within(2), pytest.raises(WorkerLostError):
            run.step(3)
        assert run.driver.recover()["step"] == 2
        after = pids(workers)
        assert [at for at in range(3) if after[at] != before[at]] == far
        run.steps(2, STEPS)
        assert run.losses == losses
        for name, value in run.driver.state_dict().items():
            assert torch.equal(value, state[name]), name

        after = pids(workers)
    assert gone(after)
    assert not ray.is_initialized()


def test_a_placement_that_cannot_be_met_says_what_is_asked_and_what_there_is(nodes):
    with within(4), pytest.raises(ClusterError) as refused:
        cluster(
            1,
            engine="ray",
            address=nodes.address,
            resources={"here": 1.5},
            spares=1,
            strategy="STRICT_PACK",
            start_timeout=1,
        )
    said = str(refused.value)
    assert said.startswith(
        "Ray did not start the workers within 1 s. Asked for: "
        "1 worker and 1 spare with CPU 1, here 1.5 each, strategy 'STRICT_PACK'. "
        "The cluster has 2 nodes: "
    )
    assert "Give fewer workers or spares, smaller resources=" in said
    assert (
        "CPU 2, here 2, run 1" in said
        and "CPU 2, far 2, run 2" in said
        and "; free are CPU 4, far 2, here 2, run 3." in said
    )
    ray.init(address=nodes.address, logging_level="ERROR")
    try:
        assert {each["state"] for each in ray.util.placement_group_table().values()} <= {"REMOVED"}
    finally:
        ray.shutdown()


def test_other_versions_are_refused(nodes, monkeypatch):
    """Here the script is the other one. What an actor runs is said at the door."""
    monkeypatch.setattr("pippy.drivers.wire.messages.doors.versions", lambda: {"Python": "2.7"})
    refused = r"gets no connection with worker 'worker0' on .*it runs Python 2\.7, and this process Python 3.*install the same"
    with pytest.raises(ClusterError, match=refused):
        cluster(1, engine="ray", address=nodes.address)


def test_a_ray_of_another_version_is_refused(nodes, monkeypatch):
    from ray._private import utils

    monkeypatch.setattr(utils, "compute_version_info", lambda: ("9.9", "3.11.7"))
    with within(5), pytest.raises(ClusterError) as refused:
        cluster(1, engine="ray", address=nodes.address)
    said = str(refused.value)
    assert (
        f"Ray: {ray.__version__}" in said and "Ray: 9.9" in said and "needs the same versions of Ray and Python" in said
    )
    assert not ray.is_initialized()


def test_a_spare_takes_a_lost_place_and_another_one_is_started(nodes, tmp_path):
    """First a worker is lost right after the spare; then one while the spare is stopped."""
    options = {"address": nodes.address, "threads": 1, "spares": 1, "resources": {"run": 1}, "timeout": 20.0}
    with cluster(1, engine="ray", **options) as workers:
        engine = workers.engine

        def spare():
            assert until(lambda: engine.spares == 1)
            (found,) = engine._waiting.present()
            return found.place["pid"]

        run, first = Run(workers), spare()
        run.save(tmp_path / "run", 0)
        assert engine.spares == 1 and first not in pids(workers)
        os.kill(first, signal.SIGKILL)
        assert until(lambda: first not in [each.place.get("pid") for each in engine._guests]), "nobody has asked for it"
        second = spare()
        run.lose(0)
        with pytest.raises(WorkerLostError):
            run.step(0)
        assert run.driver.recover()["step"] == 0
        assert pids(workers) == [second]
        run.steps(0, 2)

        third = spare()
        os.kill(third, signal.SIGSTOP)
        engine.launch = dataclasses.replace(engine.launch, timeout=1.0)
        run.lose(0)
        with pytest.raises(WorkerLostError):
            run.step(2)
        assert run.driver.recover()["step"] == 0
        assert gone([first, second, third]) and third not in pids(workers)
        run.step(0)
        (starting,) = engine._guests[1:]
        engine.launch = dataclasses.replace(engine.launch, spares=0)
        engine.end([])
        assert until(lambda: not starting.starts) and engine.spares == 0
        left = pids(workers)
    assert gone(left)


def test_a_device_that_a_node_does_not_have_is_refused(nodes):
    with pytest.raises(ClusterError, match=r"worker 'worker0' did not start on Ray: .*there is no device 'cuda:7'"):
        cluster(1, engine="ray", address=nodes.address, device="cuda:7")


def test_a_head_that_does_not_answer_is_told_within_a_bound(monkeypatch):
    monkeypatch.setattr(ray_engine, "_ENDS_WITHIN", 0.1)
    given = {"worker": "", "names": ("a", "b"), "timeout": 5.0, "patience": None}
    launch = ray_engine.RayLaunch(**given, devices=("cpu",) * 2, threads=1, bundle={"CPU": 1.0}, strategy="PACK")
    engine, over = ray_engine.RayEngine(launch), threading.Event()
    engine.ray = SimpleNamespace(is_initialized=lambda: True, nodes=over.wait)
    try:
        with (
            within(0.1),
            pytest.raises(ClusterError, match=r"the head of Ray has left a question unanswered for 0\.1 s"),
        ):
            engine.replace([1])
    finally:
        over.set()


REFUSED = [
    ({"engine": "monarch"}, "engine must be one of None, 'local', 'torchrun', 'ray'; this is 'monarch'"),
    ({"strategy": "SPREAD"}, "strategy='SPREAD' is an option of engine=\"ray\", and this cluster is on engine 'local'"),
    ({"engine": "local", "num_gpus": 1}, 'num_gpus=1 is an option of engine="ray"'),
    (
        {"engine": "ray", "pin": True},
        "pin=True is an option of cluster(n), and this cluster is on engine 'ray'; leave out pin",
    ),
    ({"engine": "torchrun"}, "torchrun has not started this script; start it so"),
    ({"engine": "ray", "strategy": "TIGHT"}, "strategy must be one of 'PACK', 'SPREAD'"),
    ({"engine": "ray", "resources": {"CPU": -1}}, "resources has, for each worker, how much it reserves of what"),
    ({"engine": "ray", "resources": {"GPU": 1}, "num_gpus": 2}, "num_gpus is how many GPUs each worker reserves"),
    ({"engine": "ray", "resources": {"CPU": 0}}, "resources reserves nothing"),
    (
        {"engine": "ray", "spares": True},
        "spares=True: give how many workers wait for the place of a lost one, 0 or more",
    ),
    (
        {"spares": 1},
        "spares=1 is an option of engine=\"ray\", and this cluster is on engine 'local', where its processes are forks of one",
    ),
    ({"spares": 1, "join": True}, "where each worker that joins beyond n is a spare, so start one more with the line"),
    ({"engine": "ray", "address": 6379}, 'address is that of a Ray that runs, as "10.0.0.1:6379", or "auto"'),
    ({"engine": "ray", "address": "ray://node:10001"}, "is that of a Ray client"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_bad_options_are_refused_before_anything_starts(folder, options, words):
    with within(2), pytest.raises(ClusterError) as refused:
        cluster(2, **options)
    assert words in str(refused.value) and not ray.is_initialized()


def test_options_of_another_engine_that_say_nothing_are_left_out(monkeypatch):
    monkeypatch.setattr(open_cluster, "local_cluster", lambda n, **options: options)
    assert open_cluster.cluster(2, spares=0, num_gpus=0, threads=1) == {"threads": 1, "start_timeout": 60.0}


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r'pip install "pippy-compiler\[ray\]"'):
        cluster(2, engine="ray")


def test_an_address_at_which_no_ray_answers_is_refused_at_once(folder):
    """Ray itself tries for minutes."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]

        def hang_up():
            other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        with within(2), pytest.raises(ClusterError, match="another program listens there; start one"):
            cluster(2, engine="ray", address=f"127.0.0.1:{port}")
        thread.join()
    with within(2), pytest.raises(ClusterError, match=r"no Ray answers at address=.*Connection refused"):
        cluster(2, engine="ray", address=f"127.0.0.1:{port}")
    with within(5), pytest.raises(ClusterError, match="no Ray answers at address='nowhere'"):
        cluster(2, engine="ray", address="nowhere")


SCRIPT = """
import os, sys, threading, time
import torch
from torch import nn
import pippy

class Says(nn.Module):
    def forward(self, x):
        print("says", x.shape[0], flush=True)
        return x

def opened():
    opens = threading.Thread(target=lambda: clusters.append(pippy.cluster(2, engine="ray", threads=1, **OPTIONS)))
    clusters = []
    opens.start()
    opens.join()  # a Ray that began here goes on
    return clusters[0]

with opened() as workers:
    model = nn.Sequential(nn.Linear(2, 2), Says(), nn.Linear(2, 2))
    pipe = pippy.Pipe.from_sequential(model, nn.MSELoss())
    driver = pippy.PipelineDriver1F1B(pipe, workers)
    driver.run(1, torch.ones(6, 2), torch.ones(6, 2))
    print("pids", *(each.pid for each in workers.session.workers), flush=True)
    time.sleep(600)
"""


def is_agent(pid):
    """Whether a process is an agent of Ray's dashboard. Where the control store died first, agents try for 60 s to tell it."""
    return b"Agent" in Path(f"/proc/{pid}/cmdline").read_bytes()


def lines_until(process, word):
    """The output up to the line that contains a word."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError("".join(lines) + process.stderr.read())


def test_ctrl_c_leaves_no_actor_and_the_ray_that_was_joined_goes_on(nodes, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("**OPTIONS", "address='auto', timeout=20.0"))
    with started(str(script)) as process:
        *_, last = lines_until(process, "pids")
        actors = list(map(int, last.split()[1:]))
        process.send_signal(signal.SIGINT)
        with within(10):
            _, errors = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in errors
        assert gone(actors)
    ray.init(address=nodes.address, logging_level="ERROR")
    try:
        assert sum(each["Alive"] for each in ray.nodes()) == 2
    finally:
        ray.shutdown()


def test_a_script_that_is_killed_leaves_nothing_of_the_ray_that_it_started(tmp_path):
    """The lines that a stage prints come with the worker's name."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("**OPTIONS", "names=['first', 'last']"))
    with ray_folder() as folder, started(str(script)) as process:
        lines = lines_until(process, "pids")
        while not (named := [line for line in lines if "says 6" in line and "pid=" in line]):
            lines += lines_until(process, "says")  # the check of the first step says it in the script
        assert all("(last pid=" in line or "(first pid=" in line for line in named)
        left = [pid for pid in processes_in(folder) if pid != process.pid and not is_agent(pid)]
        assert len(left) > 4
        process.kill()
        assert gone(left, within=30.0), "Ray's own processes notice it one after the other"
