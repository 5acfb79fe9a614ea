"""`driver.recover`: a run goes on from its newest point, to the bit, whatever has happened to it."""

import os
import signal
import threading

import pytest
import torch
from torch import nn

from exps.tried_models.residual_streams import AttentionResiduals
from pippy import PipelineDriver, pipeline
from pippy.drivers.base.errors import CheckpointError, DriverError, StepError, WorkerLostError
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.routes import Routes
from pippy.drivers.files.contents import checkpoints_in
from pippy.ir.base.errors import PippyWarning
from tests.drivers.model.recovery.runs import STAGES, Run, interrupted_in, opened, undisturbed
from tests.drivers.processes import strike

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


@pytest.mark.parametrize(
    ("schedule", "lost", "how"),
    [("1f1b", [1], signal.SIGKILL), ("zb_h1", [0, 2], signal.SIGKILL), ("zb_h1", [2], signal.SIGSTOP)],
)
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(workers, expected, tmp_path, lost, how, schedule):
    run = Run(workers, schedule=schedule)
    run.steps(0, 2)
    run.save(tmp_path, 2)
    run.steps(2, 4)
    before = [worker.pid for worker in workers.session.workers]
    run.lose_in_step(4, *lost, how=how)
    values = run.driver.recover()
    assert values == {"step": 2, "losses": {number: expected[0][number] for number in range(2)}}
    assert [at for at in range(STAGES) if workers.session.workers[at].pid != before[at]] == lost
    run.goes_on(expected, 2, STEPS)


def test_a_run_that_has_updated_nothing_begins_again(workers, expected):
    run = Run(workers)
    run.lose_in_step(0, 0)
    assert run.driver.recover() == {}
    run.goes_on(expected, 0, STEPS)


@pytest.mark.parametrize("lost", [[0], [1], [2]])
def test_a_run_goes_on_from_the_memory_of_neighbours(workers, expected, lost):
    run = Run(workers)
    for again in (1, 2, 3):
        run.steps(again - 1, again)
        run.protect(again)
    run.steps(3, 4)
    for _ in range(2):  # the new process has copies as the old one had
        run.lose_in_step(4, *lost)
        assert run.driver.recover() == {"step": 3}
        run.step(3)
        lost = [(worker + 1) % STAGES for worker in lost]
    run.goes_on(expected, 4, STEPS)


def test_two_neighbours_are_lost_and_the_run_goes_on_from_the_disk(workers, expected, tmp_path):
    run = Run(workers)
    run.protect(0)
    run.step(0)
    run.lose_in_step(1, 0, 1)
    with pytest.raises(CheckpointError, match=r"no state to recover.*protect\(\) copied of worker 'worker0' was lost"):
        run.driver.recover()
    run = Run(workers)
    run.step(0)
    path = run.save(tmp_path, 1)
    run.step(1)
    run.protect(2)
    run.lose_in_step(2, 2, 0)
    with pytest.warns(PippyWarning, match=f"goes on from {path}; what protect.* of worker 'worker2' was lost"):
        assert run.driver.recover()["step"] == 1
    run.goes_on(expected, 1, STEPS)


def test_a_worker_that_is_lost_while_a_point_is_made_leaves_the_one_before(workers, expected, tmp_path):
    run = Run(workers)
    run.step(0)
    for point, again in (("protect", 1), ("save", 2)):
        run.protect(again)
        run.step(again)
        run.lose(again)
        with pytest.raises(WorkerLostError):
            run.protect(again + 1) if point == "protect" else run.save(tmp_path, again + 1)
        assert run.driver.recover() == {"step": again}
        run.step(again)
    assert checkpoints_in(tmp_path) == []  # others may have written while what there was of it was removed
    run.save(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-3"]
    run.goes_on(expected, 3, STEPS)


def test_a_failed_step_needs_no_other_process(workers, expected):
    run = Run(workers)
    run.steps(0, 2)
    run.protect(2)
    run.step(2)
    before = [worker.pid for worker in workers.session.workers]
    with pytest.raises(StepError):
        run.driver.run(4, torch.randn(8, 5), torch.randn(8, 1))
    assert run.driver.recover() == {"step": 2}
    assert [worker.pid for worker in workers.session.workers] == before
    run.goes_on(expected, 2, STEPS)


def test_each_driver_recovers_by_itself(workers, expected, tmp_path):
    one, other = Run(workers), Run(workers)
    torch.manual_seed(0)
    with torch.random.fork_rng():
        other.step(0)
        other.save(tmp_path, 1)
    one.protect(0)
    other.lose_in_step(1, 1)
    other.driver.recover()
    with pytest.raises(DriverError, match=r"'worker1' was lost and replaced.*driver.recover"):
        one.step(0)
    assert one.driver.recover() == {"step": 0}
    one.steps(0, 2)
    other.step(1)


def test_there_must_be_a_point_with_all_optimizers(workers, tmp_path):
    run = Run(workers)
    run.step(0)
    for said in ("an optimizer has made steps", "has no state of the optimizer AdamW: give it to save"):
        with pytest.raises(CheckpointError, match=f"(?s)no state to recover.*{said}.*driver.save.*driver.protect"):
            run.driver.recover()
        run.driver.save(tmp_path, step=1)
    run.protect(1)
    assert run.driver.recover() == {"step": 1}
    run.driver.close()
    with pytest.raises(DriverError, match="closed"):
        run.driver.recover()


def test_a_checkpoint_written_beside_the_run_is_a_point_when_it_is_whole(workers, expected, tmp_path):
    run = Run(workers)
    run.steps(0, 2)
    run.save(tmp_path, 2, wait=False)
    run.driver.saving.finish()
    run.steps(2, 4)
    run.lose(2)
    assert run.driver.recover()["step"] == 2  # it looks for the dead, too
    run.goes_on(expected, 2, STEPS)


def test_recovering_in_another_thread_and_twice_and_with_a_step_under_way(workers, expected):
    run = Run(workers)
    run.step(0)
    run.protect(1)
    x = torch.randn(8, 4)
    run.lose(1, how=signal.SIGSTOP)  # or the step might be over before the worker is lost
    running = run.driver.run_async(4, x, x[:, :1])
    run.lose(1)
    found = []
    thread = threading.Thread(target=lambda: found.append(run.driver.recover()))
    thread.start()
    thread.join(100)
    assert found == [{"step": 1}] == [run.driver.recover()]
    with pytest.raises(WorkerLostError):
        running.result()
    run.goes_on(expected, 1, STEPS)


def test_a_worker_that_comes_back_on_another_host_gets_its_values_there(workers, monkeypatch):
    """Before, worker 1 hands on what comes from worker 0; then the two are on one host, and worker 2 on another."""
    hosts = ["a", "b", "b"]
    monkeypatch.setattr(
        Cluster, "hosts_of", lambda self, ranks: Routes(self.workers, tuple(hosts), ()).hosts_of(list(ranks))
    )
    x, model = torch.randn(4, 8), AttentionResiduals(STAGES)
    driver = PipelineDriver(pipeline(model, nn.MSELoss()), workers, schedule="1f1b", check=False)
    expected, links = nn.functional.mse_loss(model(x), x).detach(), []
    for moved in (False, True):
        if moved:
            strike(workers.session.workers[1].pid, signal.SIGKILL)
            hosts[:] = ["a", "a", "b"]
            with pytest.raises(WorkerLostError):
                driver.run(2, x, x)
            driver.recover()
        with driver.record() as recording:
            torch.testing.assert_close(driver.run(2, x, x), expected)
        links.append({(each.source, each.to) for each in recording.steps[-1].traffic() if each.value == "tanh"})
        assert driver.program(2).hosts == tuple("ab".index(each) for each in hosts)
    assert links == [{(0, 1), (1, 2)}, {(0, 1), (0, 2)}]


@pytest.mark.parametrize("where", ["send_again", "take_kept", "restore"])
def test_ctrl_c_and_another_loss_while_it_recovers(workers, expected, monkeypatch, where):
    run = Run(workers)
    run.step(0)
    run.protect(1)
    run.step(1)
    run.lose(1)
    holder = {"send_again": run.driver.programs, "take_kept": run.driver.recovery, "restore": run.optimizer}[where]
    name = {"send_again": "send_again", "take_kept": "_make_fresh", "restore": "take_options"}[where]
    with pytest.raises(WorkerLostError):
        run.step(2)
    with interrupted_in(monkeypatch, holder, name):
        run.driver.recover()
    with pytest.raises(DriverError, match=r"call driver.recover\(\)"):
        run.step(2)
    assert run.driver.recover() == {"step": 1}
    run.goes_on(expected, 1, STEPS)


def test_a_driver_that_was_closing_when_a_worker_was_lost_is_closed(workers, expected):
    """The other workers have dropped it; the cluster goes on with another driver's recovery."""
    other = Run(workers)
    other.protect(0)
    run = Run(workers)
    run.steps(0, 2)
    run.lose(STAGES - 1)
    with pytest.raises(WorkerLostError):
        run.driver.close()
    with pytest.raises(DriverError, match="this driver was closed; make another"):
        run.driver.recover()
    run.driver.close()
    other.driver.recover()
    other.goes_on(expected, 0, STEPS)
