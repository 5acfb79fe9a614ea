"""Workers that die during a training are replaced, and the training is the one that was not disturbed: to the bit."""

import os
import re
import signal

import pytest

import pippy
from pippy import local_cluster
from pippy.drivers.base.errors import DriverError, WorkerLostError
from pippy.ir.base.errors import PippyWarning
from tests.drivers.processes import close_open_cluster, hearing_of_deaths
from tests.training.models import assert_same, parts_of, run, shuffled, trained

pytestmark = pytest.mark.usefixtures("in_float64")


class Kills:
    """Kills a worker after each of these steps, once."""

    def __init__(self, cluster, *steps):
        self.cluster, self.steps, self.seen = cluster, list(steps), []

    def __call__(self, report):
        self.seen.append(report.step)
        if self.steps and report.step == self.steps[0]:
            worker = self.steps.pop(0) % 2
            os.kill(self.cluster.session.workers[worker].pid, signal.SIGKILL)


@pytest.mark.parametrize("steps", [(1,), (4, 5), (3, 8)])
def test_a_training_survives_its_workers(cluster, tmp_path, undisturbed, capsys, steps):
    kills = Kills(cluster, *steps)
    with hearing_of_deaths(cluster.session):
        again = run(cluster, tmp_path, callbacks=kills, max_recoveries=2)
    assert_same(again, undisturbed)
    assert again[0].recoveries == len(steps) and again[0].resumed_at == 0
    assert kills.seen[-1] == 8 and not kills.steps
    assert capsys.readouterr().err.count("was lost: killed by SIGKILL; the training goes on from step") == len(steps)


def test_it_goes_on_with_fewer_workers_if_no_other_can_be_started(tmp_path, undisturbed, capsys):
    close_open_cluster()
    with local_cluster(3, threads=1, _worker="tests.drivers.model.recovery.unforkable:Worker") as cluster:
        with pytest.warns(PippyWarning, match=r"(?s)place of worker 'worker1'.*; the run goes on with the workers"):
            again = run(cluster, tmp_path, callbacks=Kills(cluster, 5), max_recoveries=1, fewer=True)
        assert cluster.gone == {1}
    assert again[0].recoveries == 1
    assert again[0].losses == pytest.approx(undisturbed[0].losses, rel=1e-12)
    assert re.search("goes on from step [03] with 1 worker", capsys.readouterr().err)


def test_it_does_so_no_oftener_than_it_may(cluster, tmp_path, undisturbed, capsys):
    """The checkpoint of step 3 is there or not: it is written beside the steps, and a worker may die before it is whole."""
    kills = Kills(cluster, 4, 5)
    with pytest.raises(WorkerLostError):
        run(cluster, tmp_path, callbacks=kills, max_recoveries=1)
    assert not kills.steps
    assert capsys.readouterr().err.count("the training goes on from step") == 1
    assert {*os.listdir(tmp_path)} - {"step-3"} == {".lock", "step-0"}


@pytest.mark.parametrize(
    "options, says",
    [
        ({"max_recoveries": -1, "folder": "run"}, "max_recoveries=-1"),
        ({"max_recoveries": 2}, "give folder= and save_every="),
        ({"fewer": True}, "fewer=True says how a training recovers; say how often it may: max_recoveries="),
        ({"fewer": 1, "max_recoveries": 2, "folder": "run"}, "fewer=1: give True"),
        ({"max_recoveries": 2, "folder": "run", "data": iter([1])}, "cannot be read again"),
    ],
)
def test_what_it_cannot_go_back_to_is_refused_at_once(parts, options, says):
    data = options.pop("data", None) or shuffled()
    with pytest.raises(DriverError, match=says):
        pippy.train(parts.driver, data, parts.optimizer, chunks=2, steps=2, **options)


def test_points_of_a_callback_are_not_those_of_the_training(cluster, tmp_path, undisturbed):
    """A callback that keeps the best model, say: the training goes on from its own checkpoint."""
    kills = Kills(cluster, 5, 7)

    def protect_and_save(report):
        if report.step == 4:
            parts.driver.protect(note=1)
        if report.step == 7:
            parts.driver.save(tmp_path / "best", optimizer=parts.optimizer, step=7)

    parts = parts_of(cluster)
    again = trained(parts, tmp_path / "run", [protect_and_save, kills], max_recoveries=2)
    assert_same(again, undisturbed)


@pytest.mark.parametrize("name", ["save", "load"])
def test_a_worker_that_is_lost_before_the_first_step_is_an_error_and_the_same_call_can_be_made_again(
    cluster, tmp_path, undisturbed, name
):
    if name == "load":
        run(cluster, tmp_path, steps=4)
    parts = parts_of(cluster)
    real = getattr(parts.driver, name)

    def lose(*args, **kwargs):
        delattr(parts.driver, name)
        os.kill(cluster.session.workers[1].pid, signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(parts.driver, name, lose)
    parts.driver.close = lambda: None
    with pytest.raises(WorkerLostError, match=r"call driver.recover\(\)"):
        trained(parts, tmp_path, max_recoveries=1)
    assert parts.driver.recover() == {}
    del parts.driver.close
    again = trained(parts, tmp_path, max_recoveries=1)
    assert_same(again, undisturbed)
    assert again[0].recoveries == 0
