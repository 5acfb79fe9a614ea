"""What fails on a worker is told in one error, soon, and changes nothing: gradients are as before, the next run is right."""

import os
import runpy
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from pippy import MultiUseParameterConfig, pipe_split
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from pippy.drivers.worker.driver_state import DriverState
from pippy.drivers.worker.halves.split_backward import DeferredGradients
from tests.comparisons import Beside
from tests.drivers.failing_model import (
    BACKWARD,
    CHUNKS,
    EXIT,
    FORWARD,
    LOSS,
    ROWS,
    SLOW,
    UNSENDABLE,
    Training,
    no_orders,
    slow_steps,
)
from tests.drivers.processes import interrupted, within

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


@pytest.fixture
def training(cluster):
    """A driver that has made a step, and the plain model beside it."""
    made = Training(cluster)
    made.step()
    return made


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


def test_an_optimizer_that_fails(training):
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


def test_an_input_that_cannot_be_pickled_reaches_nobody(training):
    with pytest.raises(Exception, match=r"pickle|opaque"):
        training.driver.run(CHUNKS, torch.randn(ROWS, 8), threading.Lock(), torch.randn(ROWS, 8))
    training.check()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_steps_under_way_are_given_up_with_the_one_that_fails(training, which):
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


def test_gradients_are_dropped_once_though_the_step_that_should_was_given_up(training):
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


def test_several_workers_fail_in_one_step(training):
    given = no_orders(ROWS)
    for row, trap in ((0, 3), (2, 2), (4, 1)):
        given[row] = torch.tensor([trap, FORWARD])
    with within(2.0), pytest.raises(StepError, match="a forward that fails"):
        training.driver.run(CHUNKS, torch.randn(ROWS, 8), given, torch.randn(ROWS, 8))
    training.check()


def test_ctrl_c_ends_a_step_at_once(training, cluster):
    with slow_steps(cluster), within(1.0), pytest.raises(KeyboardInterrupt), interrupted(0.3):
        training.fail(SLOW)
    training.check()
    training.driver.close()


def test_a_second_ctrl_c_while_the_next_command_waits(training, cluster):
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


# Faults that were found by using the runtime as a demanding user would. Each test tells its story.


@fx.wrap
def guarded(x):
    if bool((x > 90).any()):
        raise ValueError("a bad input")
    return x


class Tied(nn.Module):
    """A weight in the first and the last stage, dropout in the middle, and inputs that make it fail."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.layer = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        y = torch.tanh(guarded(x) @ self.weight)
        pipe_split()
        y = torch.tanh(self.dropout(self.layer(y)))
        pipe_split()
        return y @ self.weight


def loss_fn(output, target):
    return ((output - target) ** 2).mean()


GOOD = torch.randn(2, 7, 8, dtype=torch.float64)
BAD = GOOD + torch.tensor([100.0, 0.0]).view(2, 1, 1)


@pytest.fixture
def both(cluster):
    pipe = {"multi_use_param_spec": MultiUseParameterConfig.REPLICATE}
    made = Beside(cluster, Tied().eval(), loss_fn, pipe=pipe, check=False)
    yield made
    made.driver.close()


def test_gradients_can_be_read_while_a_run_is_under_way(both):
    """Copies were added up before the run's gradients counted, and never again: those gradients were lost."""
    running = both.driver.run_async(2, *GOOD)
    loss_fn(both.plain(GOOD[0]), GOOD[1]).backward()
    both.same_gradients()
    running.result()
    both.same_gradients()


def test_an_update_after_a_failed_run_that_nobody_waited_for_raises(both):
    optimizer = both.driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    before = both.driver.state_dict()
    both.driver.run_async(2, *BAD)
    with pytest.raises(StepError, match="a bad input"):
        optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in both.driver.state_dict().items())
    both.zero_grad()
    both.run(2, *GOOD)
    both.same_gradients()


def test_a_failed_run_does_not_lose_the_gradients_of_the_runs_before_it(both):
    """The run that fails was the one to add up the copies: those of the run before it stayed unadded, and read None."""
    for _ in range(2):  # from here on, two runs make one update
        both.zero_grad()
        both.run(2, *GOOD)
        both.run(2, *GOOD)
    both.zero_grad()
    both.run(2, *GOOD)
    with pytest.raises(StepError, match="a bad input"):
        both.driver.run(2, *BAD)
    both.same_gradients()
    both.run(2, *GOOD)
    both.same_gradients()


def test_zero_grad_is_not_lost_with_the_run_that_carries_it(both):
    """Workers that were told to give a run up dropped its message whole, and with it the order to drop the gradients."""
    both.run(2, *GOOD)
    failing = both.driver.run_async(2, *BAD)
    both.zero_grad()
    given_up = both.driver.run_async(2, *GOOD)
    for each in (failing, given_up):
        with pytest.raises(StepError):
            each.result()
    both.same_gradients()
    both.run(2, *GOOD)
    both.same_gradients()


def test_a_mode_is_not_lost_with_the_run_that_carries_it(both):
    """As above: workers that gave the run up went on in the mode before it."""
    both.driver.train()
    both.driver.run(2, *GOOD)
    failing = both.driver.run_async(2, *BAD)
    both.driver.eval()
    given_up = both.driver.run_async(2, *GOOD)
    for each in (failing, given_up):
        with pytest.raises(StepError):
            each.result()
    both.zero_grad()
    both.run(2, *GOOD)


def test_one_gradient_can_be_read_after_zero_grad(both):
    """zero_grad() goes to all workers along with the next message; the answers of those not asked were not expected."""
    both.run(2, *GOOD)
    both.zero_grad()
    assert both.driver.get_grad("layer.bias") is None
    both.zero_grad()
    assert len(both.driver.state_dict()) == 3


class PoisonedBias(nn.Module):
    """The gradient of the bias is NaN in one place: infinity times 0."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.arange(8.0))
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        pipe_split()
        return x + 0 * self.bias.sqrt()


def test_clipping_by_a_norm_that_is_no_number_spreads_it_as_torch_does(cluster):
    """One gradient is NaN: torch makes all NaN, so that nobody trains on unaware; the driver left the others alone."""
    both = Beside(cluster, PoisonedBias(), loss_fn, check=False)
    driver, plain = both.driver, both.plain
    both.run(2, torch.randn(4, 8), torch.randn(4, 8))
    assert driver.clip_grad_norm_(1.0).isnan()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for name, gradient in driver.gradients().items():
        assert torch.equal(gradient.isnan(), plain.get_parameter(name).grad.isnan()), name
    with pytest.raises(DriverError, match="pass error_if_nonfinite=False to clip anyway"):
        driver.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not driver.clip_grad_norm_(1.0, error_if_nonfinite=False).isfinite()
