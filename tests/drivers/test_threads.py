"""Several threads of one script use one cluster, or one each; steps that are sent ahead."""

import copy
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import Pipe, PipelineDriver1F1B, current_cluster, local_cluster, pipeline
from pippy.drivers.base.errors import ClusterError, StepError
from tests.comparisons import update
from tests.drivers.failing_model import FORWARD, SLOW, Training, slow_steps
from tests.drivers.models import Chain
from tests.drivers.processes import interrupted, within
from tests.drivers.thread_cluster import thread_cluster

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

STEPS = 6


def together(*functions):
    """Call each in a thread of its own, all at once; an exception of one is raised."""
    start = threading.Barrier(len(functions))

    def run(function):
        start.wait(30)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [each.result(60) for each in [pool.submit(run, function) for function in functions]]


class Trained:
    """A model to train in a thread, and the losses of the same training in this one."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model, self.x, self.target = Chain(2), torch.randn(6, 8), torch.randn(6, 8)
        plain = copy.deepcopy(self.model)
        optimizer, self.expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
        for _ in range(STEPS):
            loss = F.mse_loss(plain(self.x), self.target)
            loss.backward()
            update(optimizer)
            self.expected.append(loss.detach())

    def check(self, cluster=None):
        """Compile and train it."""
        driver = PipelineDriver1F1B(pipeline(self.model, nn.MSELoss()), cluster, world_size=2)
        optimizer, found = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1), []
        for _ in range(STEPS):
            found.append(driver.run(3, self.x, self.target))
            update(optimizer)
        torch.testing.assert_close(found, self.expected, rtol=1e-9, atol=0)
        driver.close()


def test_each_thread_has_its_driver_on_one_cluster(threads):
    together(*[partial(Trained(seed).check, threads) for seed in range(2)])
    assert not threads.session.log.outstanding


def test_each_thread_has_its_cluster():
    def run(trained):
        with thread_cluster(2) as cluster:
            assert current_cluster() is cluster
            trained.check()

    together(*[partial(run, Trained(seed)) for seed in range(2)])


@pytest.mark.usefixtures("alone")
def test_each_thread_has_its_cluster_of_processes():
    closed = threading.Barrier(2)

    def run(trained):
        with local_cluster(2, threads=1):
            trained.check()
            with pytest.raises(ClusterError, match="only one cluster can be open in a thread"):
                local_cluster(1)
        closed.wait(60)  # a thread without a cluster takes the only one that another thread has
        with pytest.raises(ClusterError, match="no cluster is open"):
            PipelineDriver1F1B(pipeline(trained.model, nn.MSELoss()))

    together(*[partial(run, Trained(seed)) for seed in range(2)])


def test_a_thread_without_a_cluster_of_its_own_takes_that_of_the_block_it_was_started_in(threads):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_cluster).result() is threads


def test_clusters_of_several_other_threads_are_not_chosen_from():
    entered, done = threading.Barrier(3), threading.Event()

    def hold():
        with thread_cluster(1):
            entered.wait(30)
            assert done.wait(30)

    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(hold) for _ in range(2)]
        entered.wait(30)
        with pytest.raises(ClusterError, match=r"and 2 other threads have.*give the driver its cluster"):
            current_cluster()
        done.set()
        for each in held:
            each.result()


def test_one_thread_sends_steps_and_another_takes_the_results(threads):
    trained = Trained(0)
    driver = PipelineDriver1F1B(pipeline(trained.model, nn.MSELoss()), threads)
    with torch.no_grad():
        steps = [driver.run_async(3, trained.x, trained.target) for _ in range(5)]
        results = together(*[step.result for step in steps], *[step.result for step in reversed(steps)])
        last = driver.run_async(3, trained.x, trained.target)
    torch.testing.assert_close([*results, last.result()], [trained.expected[0]] * 11, rtol=1e-9, atol=0)


def test_a_step_that_fails_in_one_thread_is_no_affair_of_another(threads):
    failing, trained = Training(threads), Trained(1)

    def fail():
        for _ in range(STEPS):
            with pytest.raises(StepError, match="a forward that fails"):
                failing.fail(FORWARD)

    together(fail, lambda: trained.check(threads))
    failing.check()


def test_closing_a_cluster_ends_what_another_thread_waits_for(cluster):
    training = Training(cluster)
    with slow_steps(cluster), ThreadPoolExecutor(1) as pool:
        step = training.start(SLOW)
        waiting = pool.submit(step.result)
        while not cluster.session._waits:
            os.sched_yield()
        with within(4.0):
            cluster.close()
            with pytest.raises(ClusterError, match="this cluster is closed"):
                waiting.result(30)
    with within(0.1), pytest.raises(ClusterError, match="this cluster is closed"):
        training.step()


def test_ctrl_c_while_another_thread_takes_the_results(threads):
    training = Training(threads)
    with ThreadPoolExecutor(1) as pool, slow_steps(threads):
        step = training.start(SLOW)
        waiting = pool.submit(step.result)
        running = training.start()  # Ctrl-C before it was sent would give up nothing
        with within(1.0), pytest.raises(KeyboardInterrupt), interrupted(0.2):
            running.result()
        with pytest.raises(StepError, match="KeyboardInterrupt"):
            waiting.result(30)
    training.check()


# A step that is sent ahead is at the workers before the one that runs is answered: by events and counts, not by time.


BEGUN, RELEASED = threading.Event(), threading.Event()


class Gate(nn.Module):
    """Waits until it is released; of the same process as the test, because its workers are threads."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        BEGUN.set()
        assert RELEASED.wait(30)
        return self.linear(x)


@pytest.fixture
def gate():
    BEGUN.clear()
    RELEASED.set()
    yield
    RELEASED.set()


def test_the_next_step_is_in_every_inbox_before_this_one_is_answered(threads, gate):
    pipe = Pipe.from_sequential(nn.Sequential(Gate(), nn.Linear(4, 4)), nn.MSELoss())
    driver = PipelineDriver1F1B(pipe, threads)
    x = torch.randn(4, 4)
    first = driver.run(2, x, x)  # the program is there
    driver.zero_grad()
    RELEASED.clear()
    BEGUN.clear()
    running = driver.run_async(2, x, x)
    assert BEGUN.wait(30)  # worker 0 has taken its message, and is at its first forward
    ahead = [driver.run_async(2, x, x) for _ in range(3)]
    queues = [worker.context.messages for worker in threads.engine.workers[:2]]
    assert len(queues[0]) == 3 and len(queues[1]) in (3, 4)  # worker 1 may not have taken the first yet
    pending = running._posted.calls
    assert not any(pending[worker].done for worker in (0, 1)) and not RELEASED.is_set()
    RELEASED.set()
    assert all(torch.equal(step.result(), first) for step in [running, *ahead])
    assert [len(messages) for messages in queues] == [0, 0]
