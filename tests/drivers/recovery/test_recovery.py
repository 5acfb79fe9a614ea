"""`driver.recover`: a run goes on from its newest point, to the bit, whatever has happened to it."""

import signal

import pytest
import torch

from pippy.drivers.errors import WorkerLostError
from tests.drivers.recovery.runs import STAGES, Run, opened, undisturbed

STEPS = 6
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def workers():
    with opened() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(workers):
    torch.set_default_dtype(torch.float64)
    yield undisturbed(workers, STEPS)
    torch.set_default_dtype(torch.float32)


def goes_on(run, expected, first, last=STEPS):
    run.steps(first, last)
    losses, state = expected
    assert run.losses == {number: losses[number] for number in range(last)}
    if last == STEPS:
        for name, value in run.driver.state_dict().items():
            assert torch.equal(value, state[name]), name


@pytest.mark.parametrize(("lost", "how"), [([1], signal.SIGKILL), ([0, 2], signal.SIGKILL), ([2], signal.SIGSTOP)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(workers, expected, tmp_path, lost, how, schedule):
    run = Run(workers, schedule=schedule)
    run.steps(0, 2)
    run.save(tmp_path, 2)
    run.steps(2, 4)
    before = [worker.pid for worker in workers.control.workers]
    run.lose(*lost, how=how)
    with pytest.raises(WorkerLostError):
        run.step(4)
    values = run.driver.recover()
    assert values == {"step": 2, "losses": {number: expected[0][number] for number in range(2)}}
    assert [at for at in range(STAGES) if workers.control.workers[at].pid != before[at]] == lost
    goes_on(run, expected, 2)


def test_a_run_that_has_updated_nothing_begins_again(workers, expected):
    run = Run(workers)
    run.lose(0)
    with pytest.raises(WorkerLostError):
        run.step(0)
    assert run.driver.recover() == {}
    goes_on(run, expected, 0)
