"""Another process in the place of a worker that was lost, and the others go on."""

import copy
import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import Pipe, PipelineDriver1F1B, local_cluster
from pippy.drivers.base.errors import ClusterError, DriverError, WorkerLostError
from pippy.drivers.model.recovery.recovery import replace_lost_workers
from pippy.drivers.protocol.state import OptimizerStep
from pippy.drivers.session.command_log import PendingCommand
from tests.drivers.engines.test_descriptors import sockets
from tests.drivers.model.recovery.runs import interrupted_in
from tests.drivers.processes import close_open_cluster, open_descriptors, stop, strike, within

WORKERS = 3
pytestmark = pytest.mark.usefixtures("in_float64")


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
        loss = F.mse_loss(self.plain(x), target)
        loss.backward()
        torch.testing.assert_close(self.driver.run(3, x, target), loss.detach())

    def check(self):
        for name, gradient in self.driver.gradients().items():
            torch.testing.assert_close(gradient, self.plain.get_parameter(name).grad)


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
