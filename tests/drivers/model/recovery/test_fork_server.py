"""The process that the local workers are forked from is killed: all workers end with it, and `recover` starts another."""

import os
import signal
import sys

import pytest

from pippy import local_cluster
from pippy.drivers.base.errors import WorkerLostError
from pippy.drivers.model.recovery.recovery import NotReplaced
from pippy.ir.base.errors import PippyWarning
from tests.drivers.engines.test_descriptors import sockets
from tests.drivers.model.recovery.runs import STAGES, Run, opened, undisturbed
from tests.drivers.processes import (
    assert_no_more_shared_files,
    children,
    close_open_cluster,
    open_descriptors,
    shared_files,
    stop,
    watched,
    within,
)

STEPS = 5
pytestmark = pytest.mark.usefixtures("in_float64")


def fork_server(cluster):
    return cluster.engine.fork_server.pid


def pids(cluster):
    return [worker.pid for worker in cluster.session.workers]


def killed_in_a_step(run, number):
    """Kill the fork server while a step is under way: the step ends soon, and so do all processes of the cluster."""
    with watched(fork_server(run.cluster), *pids(run.cluster)):
        os.kill(fork_server(run.cluster), signal.SIGKILL)
        with (
            within(2.0),
            pytest.raises(
                WorkerLostError, match=r"forked from ended \(killed by SIGKILL\), and they.*driver.recover\(\)"
            ),
        ):
            run.steps(number, number + 100)


def test_a_run_goes_on_with_another_fork_server_as_if_nothing_had_happened(tmp_path):
    shared = shared_files()
    with opened() as cluster:
        expected, state = undisturbed(cluster, STEPS)
        run = Run(cluster)
        run.steps(0, 1)
        held, own = [sockets(pid) for pid in pids(cluster)], sockets(os.getpid())
        for step in (1, 2):  # the second fork server can be replaced, too
            path = run.save(tmp_path, step)
            run.protect(step)
            before = {fork_server(cluster), *pids(cluster)}
            killed_in_a_step(run, step)
            with pytest.warns(PippyWarning, match=f"goes on from {path}; what protect"):
                assert run.driver.recover()["step"] == step
            now = {fork_server(cluster), *pids(cluster)}
            assert len(now) == 1 + STAGES and not now & before
            run.steps(step, step + 1)
            assert [sockets(pid) for pid in pids(cluster)] == held
            assert sockets(os.getpid()) == own
        run.lose(1)  # and that one replaces a single worker, as the first did
        with pytest.raises(WorkerLostError):
            run.steps(3, 100)
        run.driver.recover()
        run.steps(2, STEPS)
        assert {number: run.losses[number] for number in range(STEPS)} == expected
        for name, value in run.driver.state_dict().items():
            assert value.equal(state[name]), name
        with watched(fork_server(cluster), *pids(cluster)):
            cluster.close()
    assert_no_more_shared_files(shared)


def test_a_run_goes_on_with_fewer_workers_of_another_fork_server(tmp_path):
    with opened() as cluster:
        run = Run(cluster)
        run.steps(0, 1)
        run.save(tmp_path, 1)
        killed_in_a_step(run, 1)
        assert run.driver.recover(workers=[1, 2])["step"] == 1
        assert cluster.gone == {0}
        assert sorted(children(fork_server(cluster))) == sorted(pids(cluster)[1:])
        run.steps(1, 2)
        run.driver.protect(optimizer=run.optimizer, scheduler=run.scheduler, step=2)
        assert run.driver.recover(workers=STAGES) == {"step": 2}
        assert sorted(children(fork_server(cluster))) == sorted(pids(cluster))


def test_a_fork_server_that_is_killed_while_it_starts_a_worker_is_an_error_and_the_next_try_has_another(
    monkeypatch, quick_clusters
):
    with opened() as cluster:
        run = Run(cluster)
        expected, _ = undisturbed(cluster, 2)
        stop(fork_server(cluster))
        run.lose(1)
        with pytest.raises(WorkerLostError):
            run.steps(0, 100)
        awaited = cluster.engine._await

        def killed(*given):
            monkeypatch.undo()
            os.kill(fork_server(cluster), signal.SIGKILL)
            awaited(*given)

        monkeypatch.setattr(cluster.engine, "_await", killed)
        with pytest.raises(
            NotReplaced, match=r"forked from ended \(killed by SIGKILL\) while workers started.*call recover\(\) again"
        ):
            run.driver.recover()
        before, open_before = fork_server(cluster), open_descriptors()
        monkeypatch.setattr(sys, "executable", None)
        with (
            quick_clusters.left_out(),
            pytest.raises(NotReplaced, match=r"sys.executable is None.*call recover\(\) again"),
        ):
            run.driver.recover()
        monkeypatch.undo()
        assert open_descriptors() <= open_before
        assert run.driver.recover() == {}
        assert fork_server(cluster) != before
        run.losses.clear()
        run.steps(0, 2)
        assert run.losses == expected


def test_an_idle_cluster_whose_fork_server_was_killed_leaves_nothing():
    close_open_cluster()
    own = open_descriptors()
    with local_cluster(2, threads=1) as cluster, watched(fork_server(cluster), *pids(cluster)):
        os.kill(fork_server(cluster), signal.SIGKILL)
    assert open_descriptors() == own
