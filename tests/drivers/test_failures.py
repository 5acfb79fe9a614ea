"""What fails on a worker is told in one error, soon, and changes nothing: gradients are as before, the next run is right."""

import copy
import os
import re
import runpy
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pippy.drivers.base.errors import ClusterError, DriverError, StepError, WorkerLostError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.driver.drivers import PipelineDriver, PipelineDriver1F1B
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.worker.driver_state import DriverState
from pippy.drivers.worker.halves.split_backward import DeferredGradients
from tests.comparisons import assert_gradients
from tests.drivers.failing_model import (
    ASLEEP,
    BACKWARD,
    BUSY,
    ENDLESS,
    EXIT,
    FORWARD,
    LOSS,
    SLOW,
    UNSENDABLE,
    Trapped,
    no_orders,
    orders,
    slow_steps,
    slow_until_told,
    trapped_pipe,
)
from tests.drivers.processes import hearing_of_deaths, stop, within

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
ROWS, CHUNKS = 6, 3  # two rows in each micro-batch


class Training:
    """A driver and the plain model beside it. Its first step fails as all others do: nothing is tried before."""

    def __init__(self, cluster, schedule="1f1b", check=False, **options):
        self.plain = Trapped()
        pipe = trapped_pipe(copy.deepcopy(self.plain))
        self.driver = PipelineDriver(pipe, cluster, schedule=schedule, check=check, **options)

    def step(self):
        """A good step on both sides."""
        x, target = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
        loss = F.mse_loss(self.plain(x, no_orders(ROWS)), target)
        loss.backward()
        mine = self.driver.run(CHUNKS, x, no_orders(ROWS), target)
        torch.testing.assert_close(mine, loss.detach(), rtol=1e-10, atol=0)

    def fail(self, how, trap=1, microbatch=1):
        """A step that fails."""
        return self.start(how, trap, microbatch).result()

    def start(self, how=0, trap=1, microbatch=1):
        target = torch.randn(ROWS, 8)
        if how == LOSS:
            target[2 * microbatch] = torch.nan
        given = orders(ROWS, trap, how, 2 * microbatch)
        return self.driver.run_async(CHUNKS, torch.randn(ROWS, 8), given, target)

    def check(self):
        """Gradients are those of the good steps, and a further step is right."""
        self.check_gradients()
        self.step()
        self.check_gradients()

    def check_gradients(self):
        assert_gradients(self.driver, self.plain, rtol=1e-9, atol=1e-12)


STEPS = {
    "forward": (FORWARD, ["F1.1", "stage 1, micro-batch 1", "a forward that fails", "[2, 8]", "self.traps|trap("]),
    "exit": (EXIT, ["F1.1", "a forward that leaves"]),
    "backward": (BACKWARD, ["B1.1", "stage 1, micro-batch 1", "a backward that fails", "[2, 8]", "failing_model.py"]),
    "loss": (LOSS, ["stage 3, micro-batch 1", "a loss that fails", "[2, 8]", "failing_model.py"]),
    "send": (UNSENDABLE, ["an opaque value stays where it is", "could not be sent to worker 2", "Opaque"]),
}


@pytest.mark.parametrize("full", [False, True])
def test_the_trace_of_a_worker_is_that_of_the_model(threads, monkeypatch, full):
    """What is between the controller's command and the model says nothing of the model, unless pippy itself fails."""
    monkeypatch.setenv("PIPPY_TRACEBACK", "full" if full else "")
    training = Training(threads)
    training.step()
    with pytest.raises(StepError) as caught:
        training.fail(FORWARD)
    trace = caught.value.failure.traceback
    assert "failing_model.py" in trace
    assert ("driver_state.py" in trace) == full
    monkeypatch.setattr(DriverState, "_context", lambda *_: 1 // 0)  # as a fault of pippy
    with pytest.raises(StepError) as caught:
        training.step()
    assert "driver_state.py" in caught.value.failure.traceback
    assert "ZeroDivisionError" in caught.value.failure.traceback


@pytest.mark.parametrize("accumulated", [0, 2])
@pytest.mark.parametrize("case", STEPS)
def test_a_step_that_fails_is_told_of_and_forgotten(cluster, case, accumulated):
    how, texts = STEPS[case]
    training, other = Training(cluster), Training(cluster, world_size=2)
    for _ in range(accumulated):
        training.step()
    other.step()
    with within(2.0), pytest.raises(StepError) as caught:
        training.fail(how)
    text = str(caught.value)
    for part in [*texts, "The worker's traceback", "(worker"]:
        assert any(each in text for each in part.split("|")), (part, text)
    assert caught.value.worker == (3 if how == LOSS else 1)
    other.check()
    training.check()


@pytest.mark.parametrize(("how", "place"), [(BACKWARD, "I1.1"), (None, "W1.1")])
def test_the_halves_of_a_backward(threads, monkeypatch, how, place):
    training = Training(threads, "zb_h1")
    training.step()
    if how is None:
        inner = DeferredGradients.run
        calls = []

        def fail(self):
            calls.append(self)
            if len(calls) == 5:
                raise ArithmeticError("a backward that fails")
            inner(self)

        monkeypatch.setattr(DeferredGradients, "run", fail)
    with within(2.0), pytest.raises(StepError, match="a backward that fails") as caught:
        training.fail(how or 0)
    assert (how is None and " at W" in str(caught.value)) or place in str(caught.value)
    monkeypatch.undo()
    training.check()


@pytest.mark.parametrize("when", ["in the step", "after it"])
def test_a_reduction_that_fails_on_one_worker_counts_on_none(threads, monkeypatch, when):
    from pippy.drivers.worker.gradients.gradient_sums import AddingUp

    training = Training(threads)
    training.step()
    if when == "in the step":
        training.driver.zero_grad()
        training.plain.zero_grad()
    inner = AddingUp.take

    def fail(self, *args):
        inner(self, *args)
        raise ArithmeticError("a sum that fails")

    monkeypatch.setattr(AddingUp, "take", fail)
    where = r"(reduce|receive sum of) \S+weight" if when == "in the step" else "adding up the gradients of replicated"
    with within(2.0), pytest.raises(StepError, match=where) as caught:
        training.start().result() if when == "in the step" else training.driver.grad_norm()
    assert "a sum that fails" in str(caught.value)
    monkeypatch.undo()
    if when == "in the step":
        assert not any(gradient is not None for gradient in training.driver.gradients().values())
        training.step()
    training.check()


class Stubborn(torch.optim.SGD):
    """Never steps."""

    def step(self, closure=None):
        raise ArithmeticError("an optimizer that fails")


def test_an_optimizer_that_fails(cluster):
    training = Training(cluster)
    training.step()
    stubborn = training.driver.instantiate_optimizer(Stubborn, lr=0.1)
    good = training.driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    with within(2.0), pytest.raises(StepError, match="failed at OptimizerStep") as caught:
        stubborn.step()
    assert "an optimizer that fails" in str(caught.value) and "load a state dict" in str(caught.value)
    training.check()
    good.step()
    torch.optim.SGD(training.plain.parameters(), lr=0.1).step()
    training.check()


class Unloadable(torch.nn.Linear):
    """Can be pickled, and not be unpickled."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ArithmeticError("a module that cannot be read")


def test_a_stage_that_cannot_be_loaded(cluster):
    from pippy import Pipe

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Unloadable(8, 8))
    other = Training(cluster)
    with within(2.0), pytest.raises(StepError, match="failed at Load") as caught:
        PipelineDriver1F1B(Pipe.from_sequential(model), cluster)
    assert "a module that cannot be read" in str(caught.value)
    other.check()


def test_a_program_that_a_worker_cannot_take(threads, monkeypatch):
    from pippy.drivers.worker.executor import Executor

    training = Training(threads)
    inner = Executor.__init__

    def fail(self, bound, *rest):
        if any("F2" in str(each) for each in bound.program.order):
            raise ArithmeticError("a program that fails")
        inner(self, bound, *rest)

    monkeypatch.setattr(Executor, "__init__", fail)
    with within(2.0), pytest.raises(StepError, match="failed at AddProgram"):
        training.step()
    monkeypatch.undo()
    training.plain.zero_grad()
    training.check()


def test_an_input_that_cannot_be_pickled_reaches_nobody(cluster):
    training = Training(cluster)
    training.step()
    with pytest.raises(Exception, match=r"pickle|opaque"):
        training.driver.run(CHUNKS, torch.randn(ROWS, 8), threading.Lock(), torch.randn(ROWS, 8))
    training.check()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_steps_under_way_are_given_up_with_the_one_that_fails(cluster, which):
    training = Training(cluster)
    training.step()
    plan = [0, 0, 0, 0]
    plan[which] = FORWARD
    training.driver.zero_grad()
    training.plain.zero_grad()
    running = [training.start(how) for how in plan]
    for step in running[:which]:
        step.result()
    for number, step in enumerate(running[which:]):
        with within(2.0), pytest.raises(StepError, match="given up because step" if number else "a forward that fails"):
            step.result()
    training.driver.zero_grad()
    training.check()


def test_gradients_are_dropped_once_though_the_step_that_should_was_given_up(cluster):
    training = Training(cluster)
    training.step()
    training.driver.zero_grad()
    training.plain.zero_grad()
    with pytest.raises(StepError):
        training.fail(FORWARD, trap=0, microbatch=0)
    training.check()


def test_the_mode_that_a_step_given_up_was_to_set(cluster):
    training = Training(cluster)
    training.driver.eval()
    with pytest.raises(StepError):
        training.fail(FORWARD, trap=0, microbatch=0)
    assert training.driver.commands.flags_due
    training.driver.train()
    training.check()


def test_two_failures_one_after_the_other_on_different_workers(cluster):
    """The workers of the second driver hear of the first failure only when they do something again."""
    training, other = Training(cluster), Training(cluster, all_ranks=[2, 3])
    training.step()
    with pytest.raises(StepError):
        training.fail(BACKWARD, trap=0, microbatch=2)
    with pytest.raises(StepError):
        other.fail(FORWARD)
    training.check()
    other.check()


def test_several_workers_fail_in_one_step(cluster):
    training = Training(cluster)
    training.step()
    given = no_orders(ROWS)
    for row, trap in ((0, 3), (2, 2), (4, 1)):
        given[row] = torch.tensor([trap, FORWARD])
    with within(2.0), pytest.raises(StepError, match="a forward that fails"):
        training.driver.run(CHUNKS, torch.randn(ROWS, 8), given, torch.randn(ROWS, 8))
    training.check()


@contextmanager
def interrupted(after):
    """Sends this process SIGINT, so many seconds later."""
    stop = threading.Event()

    def run():
        if not stop.wait(after):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_ctrl_c_ends_a_step_at_once(cluster):
    training = Training(cluster)
    training.step()
    with slow_steps(cluster), within(1.0), pytest.raises(KeyboardInterrupt), interrupted(0.3):
        training.fail(SLOW)
    training.check()
    training.driver.close()


def test_a_second_ctrl_c_while_the_next_command_waits(cluster):
    training = Training(cluster)
    training.step()
    with slow_steps(cluster), within(1.0), pytest.raises(KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt), interrupted(0.2):
            training.fail(SLOW)
        with interrupted(0.2):
            training.driver.run(1, torch.randn(2, 8), no_orders(2), torch.randn(2, 8))
    training.check()
    training.driver.close()


def test_ctrl_c_at_any_moment_of_posting(cluster):
    training = Training(cluster)
    for delay in (0.001, 0.002, 0.004, 0.008, 0.016, 0.032):
        training.step()
        training.driver.zero_grad()
        training.plain.zero_grad()
        with pytest.raises(KeyboardInterrupt), interrupted(delay):
            while True:
                training.start()
        training.driver.zero_grad()
    training.check()


def test_ctrl_c_waits_for_the_end_of_a_block():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(1)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_stays_ignored_where_it_was():
    """As in a script that was started in the background: Python leaves it so, and a step changes nothing about it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_these_tests_pass_in_the_background():
    """A shell starts `make test &` with Ctrl-C ignored, and all that is started from there inherits it."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))  # as pytest does first
            test_ctrl_c_waits_for_the_end_of_a_block()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def own(alone):
    """A cluster that may be broken."""
    with local_cluster(4, threads=1, timeout=20.0) as cluster:
        yield cluster
    for address in cluster.session.workers:
        assert not os.path.exists(f"/proc/{address.pid}")


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


def test_a_worker_killed_while_idle(own):
    training = Training(own)
    training.step()
    os.kill(own.session.workers[2].pid, signal.SIGKILL)
    killed = pytest.raises(WorkerLostError, match="SIGKILL")
    with hearing_of_deaths(own.session), within(1.0), killed as caught:
        training.step()
    assert caught.value.index == 2


def test_a_stopped_worker_is_lost_and_one_that_goes_on_in_time_is_not(own):
    training = Training(own)
    training.step()
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


def test_a_worker_that_computes_with_pythons_lock_is_not_lost(own):
    """It leaves pings unanswered for longer than the ``timeout``, and what it does is said."""
    training = Training(own)
    training.step()
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


def test_a_worker_that_waits_with_pythons_lock_is_lost(own):
    training = Training(own)
    training.step()
    own.session.timeout, own.session.interval = 1.0, 0.2
    with (
        within(2.5),
        pytest.raises(WorkerLostError, match=r"it waits since 1 s in .*failing_model.py:\d+, in hold_pythons"),
    ):
        training.fail(ASLEEP)
    training.driver.recover()
    training.plain.zero_grad()
    training.check()


def test_a_step_that_takes_too_long(own):
    """Before it and after it are steps that may take as long as they do."""
    training = Training(own)
    training.step()
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


def test_recover_alone_is_enough_after_ctrl_c_in_a_stage_that_never_ends(own):
    training = Training(own)
    training.step()
    own.session.timeout = 1.0
    give_up(training, "Ctrl-C")
    with within(1.0 + 3.0):
        training.driver.recover()
    training.plain.zero_grad()
    training.check()


def test_a_step_that_never_ends_is_lost_when_its_time_limit_is_over(own):
    training = Training(own)
    training.step()
    training.driver.steps.settings.timeout, own.session.timeout = 0.5, 1.0
    error = give_up(training, "a time limit")
    assert re.search(NEVER_ENDS, str(error)) and "took longer than 0.5 s (step_timeout)" in str(error.__cause__)
    with within(0.1), pytest.raises(WorkerLostError):
        training.step()
    training.driver.recover()
    training.plain.zero_grad()
    training.check()


@pytest.mark.parametrize("limit", [0, -1, True, "1"])
def test_a_time_limit_that_is_none(cluster, limit):
    with pytest.raises(DriverError, match="step_timeout"):
        Training(cluster, step_timeout=limit)
