"""Other processes in lost places, and the server that forks them."""

import copy
import os
import signal
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import Pipe, PipelineDriver1F1B, local_cluster
from pippy.drivers.base.errors import ClusterError, DriverError, WorkerLostError
from pippy.drivers.model.recovery.recovery import NotReplaced, replace_lost_workers
from pippy.drivers.protocol.state import OptimizerStep
from pippy.drivers.session.command_log import PendingCommand
from pippy.ir.base.errors import PippyWarning
from tests.comparisons import assert_gradients, assert_loss
from tests.drivers.engines.test_descriptors import sockets
from tests.drivers.model.recovery.runs import STAGES, Run, interrupted_in, opened, undisturbed
from tests.drivers.processes import (
    assert_no_more_shared_files,
    children,
    close_open_cluster,
    open_descriptors,
    shared_files,
    stop,
    strike,
    watched,
    within,
)

pytestmark = pytest.mark.usefixtures("in_float64")

WORKERS = 3


@pytest.fixture(scope="module")
def workers():
    close_open_cluster()
    with local_cluster(WORKERS, threads=1, timeout=20.0) as cluster:
        yield cluster


class Training:
    """A driver, and the plain model."""

    def __init__(self, cluster, stages=WORKERS, **options):
        self.plain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(stages)])
        self.driver = PipelineDriver1F1B(
            Pipe.from_sequential(copy.deepcopy(self.plain), nn.MSELoss()), cluster, **options
        )

    def step(self):
        x, target = torch.randn(6, 4), torch.randn(6, 4)
        assert_loss(self.driver.run(3, x, target), F.mse_loss(self.plain(x), target))

    def check(self):
        assert_gradients(self.driver, self.plain)


def pids(cluster):
    return [worker.pid for worker in cluster.session.workers]


def lose(cluster, training, *lost, how=signal.SIGKILL):
    cluster.session.timeout = 2.0 if how == signal.SIGSTOP else 20.0
    for worker in lost:
        strike(pids(cluster)[worker], how)
    with pytest.raises(WorkerLostError):
        training.step()


@pytest.mark.parametrize(
    ("lost", "how", "soon"),
    [([1], signal.SIGKILL, 2.0), ([0, 2], signal.SIGSTOP, 4.0), ([0, 1, 2], signal.SIGKILL, 2.0)],
)
def test_lost_workers_are_replaced_and_the_others_keep_their_processes(workers, lost, how, soon):
    training = Training(workers)
    training.step()
    before, open_before = pids(workers), [sockets(pid) for pid in pids(workers)]
    own = open_descriptors()
    lose(workers, training, *lost, how=how)
    with within(soon):
        assert replace_lost_workers(workers) == tuple(lost)
    assert [at for at in range(WORKERS) if pids(workers)[at] != before[at]] == lost
    assert replace_lost_workers(workers) == ()
    for call in (training.step, training.driver.gradients, training.driver.state_dict):
        with pytest.raises(DriverError, match=r"worker 'worker\d'.* was lost and replaced.*driver.recover"):
            call()
    for again in (Training(workers), Training(workers)):
        again.step()
        again.check()
    assert [sockets(pid) for pid in pids(workers)] == open_before
    assert open_descriptors() == own
    for pid in (before[at] for at in lost):
        assert not os.path.exists(f"/proc/{pid}")


def test_a_driver_without_stages_on_the_lost_worker_goes_on_with_its_gradients(workers):
    training, other = Training(workers), Training(workers, stages=2, all_ranks=[0, 2])
    other.step()
    other.step()  # nothing has told the workers yet that it succeeded
    lose(workers, training, 1)
    replace_lost_workers(workers)
    other.step()
    other.check()


def test_a_step_that_was_under_way_as_a_worker_was_lost_leaves_no_gradients_though_others_were_tried_then(workers):
    """A step that was refused in the broken cluster took its place in what the other workers were told to give up."""
    other = Training(workers, stages=2, all_ranks=[0, 2])
    other.step()
    given_up = other.driver.run_async(3, torch.randn(6, 4), torch.randn(6, 4))
    for call in given_up._posted.calls.values():
        workers.session.answer(call)  # it has succeeded, and the controller has not looked yet
    workers.session.mark_lost(1, "killed")
    for _ in range(2):
        with pytest.raises(ClusterError, match="lost a worker"):
            other.driver.run(3, torch.randn(6, 4), torch.randn(6, 4))
    replace_lost_workers(workers)
    other.step()
    other.check()


def test_an_update_that_was_under_way_as_a_worker_was_lost_may_be_done_by_half(workers):
    other = Training(workers, stages=2, all_ranks=[0, 2])
    optimizer = other.driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    other.step()
    bodies = dict.fromkeys((0, 2), OptimizerStep(optimizer.number, None, False))
    workers.session.post(PendingCommand(bodies, other.driver.number))
    os.kill(pids(workers)[1], signal.SIGKILL)
    workers.session.mark_lost(1, "killed")
    replace_lost_workers(workers)
    with pytest.raises(DriverError, match=r"changed what others hold.*call driver.recover\(\)"):
        other.step()


def test_a_worker_is_lost_while_another_is_replaced(workers, monkeypatch):
    training = Training(workers)
    lose(workers, training, 1)
    replace = workers.engine.replace

    def replace_and_lose(which):
        monkeypatch.undo()
        found = replace(which)
        os.kill(pids(workers)[2], signal.SIGKILL)
        return found

    monkeypatch.setattr(workers.engine, "replace", replace_and_lose)
    with pytest.raises(WorkerLostError, match="'worker2'"):
        replace_lost_workers(workers)
    assert replace_lost_workers(workers) == (1, 2)
    again = Training(workers)
    again.step()
    again.check()


def test_ctrl_c_while_a_worker_is_replaced_can_be_followed_by_another_try(workers, monkeypatch):
    training = Training(workers)
    lose(workers, training, 1)
    for where, name in ((workers.engine, "_await"), (workers.session, "mend")):
        with interrupted_in(monkeypatch, where, name):
            replace_lost_workers(workers)
        with pytest.raises(ClusterError, match="lost a worker"):
            training.step()
    assert replace_lost_workers(workers) == (1,)
    again = Training(workers)
    again.step()
    again.check()


def test_waits_of_other_threads_end_before_the_worker_is_replaced(workers):
    training, found = Training(workers), []

    def run():
        try:
            training.step()
        except Exception as error:
            found.append(error)

    workers.session.timeout = 2.0
    stop(pids(workers)[2])
    thread = threading.Thread(target=run)
    thread.start()
    while not replace_lost_workers(workers):
        thread.join(0.01)
    thread.join(100)
    assert [type(each) for each in found] == [WorkerLostError]


def test_a_process_that_cannot_be_forked_is_an_error_and_can_be_tried_again():
    close_open_cluster()
    with local_cluster(WORKERS, threads=1, _worker="tests.drivers.model.recovery.unforkable:Worker") as cluster:
        training, other = Training(cluster), Training(cluster, stages=2, all_ranks=[0, 2])
        other.step()
        lose(cluster, training, 1)
        own = open_descriptors()
        with pytest.raises(
            ClusterError,
            match=r"(?s)in the place of worker 'worker1'.*no other process.*ulimit -u.*call recover\(\) again",
        ):
            training.driver.recover()
        assert open_descriptors() <= own
        assert training.driver.recover() == {}
        training.step()
        other.step()
        other.check()


def test_a_closed_cluster_replaces_nothing():
    close_open_cluster()
    with local_cluster(2, threads=1) as cluster:
        pass
    with pytest.raises(ClusterError, match="this cluster is closed; open another"):
        replace_lost_workers(cluster)


# The process that the local workers are forked from is killed: all workers end with it, and `recover` starts another.


STEPS = 5


def fork_server(cluster):
    return cluster.engine.fork_server.pid


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
