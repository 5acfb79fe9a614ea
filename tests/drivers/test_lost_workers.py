"""Workers that are lost, stopped, or never end: who notices it, how soon, and that the run goes on."""

import os
import random
import re
import signal
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch

from exps.injected.gentle import gentle
from exps.injected.training import Training as TrainingOfFaults
from pippy.drivers.base.errors import ClusterError, DriverError, StepError, WorkerLostError
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.wire.messages.rpc import RpcValues
from tests.drivers.failing_model import (
    ASLEEP,
    BUSY,
    CHUNKS,
    ENDLESS,
    FORWARD,
    ROWS,
    SLOW,
    Training,
    no_orders,
    orders,
    slow_steps,
    slow_until_told,
)
from tests.drivers.processes import hearing_of_deaths, interrupted, open_descriptors, stop, within
from tests.drivers.torchrun_jobs import ROOT, started

pytestmark = pytest.mark.usefixtures("in_float64", "seeded", "alone")


@pytest.fixture
def own(alone):
    """A cluster that may be broken."""
    with local_cluster(4, threads=1, timeout=20.0) as cluster:
        yield cluster
    for address in cluster.session.workers:
        assert not os.path.exists(f"/proc/{address.pid}")


@pytest.fixture
def training(own):
    """A driver that has made a step, and the plain model beside it."""
    made = Training(own)
    made.step()
    return made


def recover(training):
    training.driver.recover()
    training.plain.zero_grad()
    training.check()


@contextmanager
def signalled(cluster, worker, number, after=0.3):
    timer = threading.Timer(after, os.kill, (cluster.session.workers[worker].pid, number))
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_worker_while_it_computes_or_others_wait(own, victim):
    training = Training(own)
    with slow_steps(own):
        running = [training.start(SLOW, trap=1), training.start()]
        with (
            signalled(own, victim, signal.SIGKILL),
            hearing_of_deaths(own.session),
            within(1.0),
            pytest.raises(WorkerLostError, match="SIGKILL") as caught,
        ):
            running[0].result()
        assert caught.value.index == victim
        with within(0.1), pytest.raises(ClusterError, match="is lost"):
            running[1].result()
        with within(0.1), pytest.raises(ClusterError, match="is lost"):
            training.start()


def test_a_worker_killed_while_the_first_step_is_tried(own):
    training = Training(own, check=True)
    with (
        slow_steps(own),
        signalled(own, 1, signal.SIGKILL),
        hearing_of_deaths(own.session),
        within(1.3),
        pytest.raises(WorkerLostError, match="SIGKILL") as caught,
    ):
        training.start(SLOW)
    assert caught.value.index == 1


def test_a_worker_killed_while_idle(training, own):
    os.kill(own.session.workers[2].pid, signal.SIGKILL)
    killed = pytest.raises(WorkerLostError, match="SIGKILL")
    with hearing_of_deaths(own.session), within(1.0), killed as caught:
        training.step()
    assert caught.value.index == 2


def test_a_stopped_worker_is_lost_and_one_that_goes_on_in_time_is_not(training, own):
    pid = own.session.workers[2].pid
    stop(pid)
    with signalled(own, 2, signal.SIGCONT, after=0.8):
        training.step()
    training.check()
    stop(pid)
    running = training.start()
    deadline = time.monotonic() + 60.0
    while "from worker 2" not in (dump := own.dump(0.3)) or "'worker3': worker 3" not in dump:  # yet
        assert time.monotonic() < deadline, dump
    assert "'worker2': no answer within 0.3 s" in dump
    assert "of micro-batch 0 of step" in dump, dump
    own.session.timeout = 2.0
    with (
        within(own.session.interval + own.session.timeout + 1.0),
        pytest.raises(
            WorkerLostError, match=r"a ping.* its process is stopped; kill -CONT \d+ lets it go on"
        ) as caught,
    ):
        running.result()
    assert caught.value.index == 2


def test_a_worker_that_computes_with_pythons_lock_is_not_lost(training, own):
    """It leaves pings unanswered for longer than the ``timeout``, and what it does is said."""
    own.session.timeout, own.session.interval = 0.5, 0.2
    said, over = [], threading.Event()

    def ask():
        while not over.wait(0.1):
            said.append(own.dump(0.3))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        training.fail(BUSY)
    finally:
        over.set()
        asking.join()
    words = (
        r"'worker1': no answer within 0.3 s: it is busy since [1-3] s in .*failing_model.py:\d+, in hold_pythons_lock"
    )
    assert any(re.search(words, each) for each in said), said
    training.driver.zero_grad()
    training.plain.zero_grad()
    training.check()


def test_a_worker_that_waits_with_pythons_lock_is_lost(training, own):
    own.session.timeout, own.session.interval = 1.0, 0.2
    with (
        within(2.5),
        pytest.raises(WorkerLostError, match=r"it waits since [1-3] s in .*failing_model.py:\d+, in hold_pythons"),
    ):
        training.fail(ASLEEP)
    recover(training)


def test_a_step_that_takes_too_long(training, own):
    """Before it and after it are steps that may take as long as they do."""
    training.driver.steps.settings.timeout = 0.5
    with (
        slow_until_told(own, "F1.1", "from worker 1"),
        within(1.5),
        pytest.raises(StepError, match="took longer") as caught,
    ):
        training.fail(SLOW)
    text = str(caught.value)
    assert "F1.1" in text and "from worker 1" in text, text
    training.driver.steps.settings.timeout = None
    training.check()


NEVER_ENDS = r"worker 'worker1'.* 1 s after it was told to give up .*says: .*F1\.1.*call driver\.recover\(\)"
GIVEN_UP = {"Ctrl-C": KeyboardInterrupt, "a time limit": WorkerLostError, "an error elsewhere": StepError}
NEXT = {
    "run": lambda driver, other, folder: driver.run(
        CHUNKS, torch.randn(ROWS, 8), no_orders(ROWS), torch.randn(ROWS, 8)
    ),
    "gradients": lambda driver, other, folder: driver.gradients(),
    "state_dict": lambda driver, other, folder: driver.state_dict(),
    "save": lambda driver, other, folder: driver.save(folder),
    "an optimizer": lambda driver, other, folder: driver.instantiate_optimizer(torch.optim.SGD, lr=0.1),
    "close": lambda driver, other, folder: driver.close(),
    "another driver": lambda driver, other, folder: other.gradients(),
}


def give_up(training, how):
    """A step in which stage 1 never ends is given up."""
    given = orders(ROWS, 1, ENDLESS, 2)
    if how == "an error elsewhere":
        given[0] = torch.tensor([3, FORWARD])
    interrupts = interrupted(0.3) if how == "Ctrl-C" else nullcontext()
    with within(3.0), pytest.raises(GIVEN_UP[how]) as caught, interrupts:
        training.driver.run(CHUNKS, torch.randn(ROWS, 8), given, torch.randn(ROWS, 8))
    return caught.value


@pytest.mark.parametrize(
    "how, what",
    [*(("Ctrl-C", what) for what in NEXT), ("an error elsewhere", "run"), ("an error elsewhere", "another driver")],
)
def test_every_call_ends_after_a_stage_that_never_ends_was_given_up(own, tmp_path, how, what):
    """The worker is lost after the cluster's ``timeout``, and replaced. The others go on."""
    training, other = Training(own), Training(own, world_size=2)
    training.step()
    other.step()
    own.session.timeout = 1.0
    give_up(training, how)
    with within(1.0 + 1.5), pytest.raises(WorkerLostError, match=NEVER_ENDS):
        NEXT[what](training.driver, other.driver, tmp_path)
    pids = [each.pid for each in own.session.workers]
    other.driver.recover()
    assert [each.pid == pid for each, pid in zip(own.session.workers, pids)] == [True, False, True, True]
    other.plain.zero_grad()
    other.check()


def test_recover_alone_is_enough_after_ctrl_c_in_a_stage_that_never_ends(training, own):
    own.session.timeout = 1.0
    give_up(training, "Ctrl-C")
    with within(1.0 + 3.0):
        recover(training)


def test_a_step_that_never_ends_is_lost_when_its_time_limit_is_over(training, own):
    training.driver.steps.settings.timeout, own.session.timeout = 0.5, 1.0
    error = give_up(training, "a time limit")
    assert re.search(NEVER_ENDS, str(error)) and "took longer than 0.5 s (step_timeout)" in str(error.__cause__)
    with within(0.1), pytest.raises(WorkerLostError):
        training.step()
    recover(training)


@pytest.mark.parametrize("limit", [0, -1, True, "1"])
def test_a_time_limit_that_is_none(cluster, limit):
    with pytest.raises(DriverError, match="step_timeout"):
        Training(cluster, step_timeout=limit)


# Workers that send each other values by RPC: what is lost on the way is an error, soon, and never a wait without an end.


@pytest.mark.parametrize("how, timeout", [("cut", "20"), ("silent", "3")])
def test_what_is_lost_between_two_workers(how, timeout):
    """A worker finds a silence after timeout + 2 s; only one that stalls for seconds after 4 × timeout, as the kernel does."""
    script = str(ROOT / "tests/drivers/rpc_script.py")
    with started(
        "-m", "tests.drivers.forking_torchrun", "--standalone", "--nproc-per-node", "3", script, how, timeout
    ) as job:
        lines, errors = job.communicate(timeout=120)
        assert lines.splitlines()[-1:] == ["lost"], errors


class Watched:
    """Values that are said to be on their way, and what is said of peers that were lost."""

    def __init__(self):
        self.lost, self.was_lost = [], threading.Event()
        self.values = RpcValues(str, self.note, seconds=0.1)

    def note(self, peer, how):
        self.lost.append((peer, how))
        self.was_lost.set()

    def sent(self, peer, size=8):
        future = torch.futures.Future()
        self.values.watch(peer, size, future)
        return future


def test_a_value_that_nobody_takes_up_is_a_lost_peer():
    """A connection that is cut without a word, as by a cable: TCP itself would try on for a quarter of an hour."""
    watched = Watched()
    watched.sent(1).set_result(None)
    slow, stuck = watched.sent(2, size=1 << 30), watched.sent(3)
    with within(1.0):
        assert watched.was_lost.wait(10)
    assert watched.lost == [(3, "it has not taken up a value of 8 bytes within 0.1 s")]
    stuck.set_exception(RuntimeError("too late"))
    assert len(watched.lost) == 1
    slow.set_exception(RuntimeError("eof\nC++ traceback"))
    assert watched.lost[1:] == [(2, "the connection broke: eof")]


def test_connections_that_break_at_the_end_are_no_loss():
    watched = Watched()
    future = watched.sent(1)
    watched.values.end()
    future.set_exception(RuntimeError("eof"))
    assert not watched.lost


# A few faults of the campaign in exps/faults.py on one cluster: each is noticed, and what follows is right.


KINDS = ["exit", "no memory", "no descriptors", "no shared memory", "ctrl-c", "ctrl-c twice"]


def test_random_faults_of_every_kind_that_a_cluster_survives(cluster):
    rng = random.Random(1)
    rng.shuffle(KINDS)
    open_now = None
    for kind in KINDS:
        training = TrainingOfFaults(cluster, rng)
        report = gentle(training, kind)
        assert not report.wrong, report
        training.driver.close()
        open_now = open_now or open_descriptors()
    assert open_descriptors() <= open_now
