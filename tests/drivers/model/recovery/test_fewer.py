"""`driver.recover` with fewer workers or replicas: the losses are those of a run to which nothing has happened."""

import os
import signal
from contextlib import nullcontext

import pytest
import torch

from pippy import local_cluster
from pippy.drivers.base.errors import ClusterError, DriverError
from pippy.drivers.model.recovery.recovery import replace_lost_workers
from pippy.drivers.plan import make_schedule
from pippy.ir.base.errors import PippyWarning
from tests.drivers.model.recovery.runs import Run, interrupted_in, model, opened, undisturbed
from tests.drivers.processes import close_open_cluster

STAGES, STEPS = 4, 6
REL = 1e-12  # gradients are added up in another order where the stages are placed anew
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def cluster():
    with opened(STAGES) as opened_cluster:
        yield opened_cluster


@pytest.fixture
def workers(cluster):
    """Four workers; those that a test has left out are started again."""
    replace_lost_workers(cluster, wanted=lambda lost: lost | cluster.gone)
    return cluster


@pytest.fixture(scope="module")
def expected(cluster):
    """The losses and the state of a run to which nothing happens, by the number of its stages."""
    torch.set_default_dtype(torch.float64)
    found = {stages: undisturbed(cluster, STEPS, made=model(stages, stages > 2)) for stages in (2, STAGES)}
    yield found
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("point", ["start", "disk", "memory"])
def test_four_workers_then_three_then_two(workers, expected, tmp_path, point):
    run = Run(workers, made=model(STAGES))
    at = 0
    for lost, left in ((1, [0, 2, 3]), (3, [0, 2])):
        if point != "start":
            run.steps(at, at + 1)
            at += 1
            run.protect(at) if point == "memory" else run.save(tmp_path, at)
        run.steps(at, at + 1) if point != "start" else None
        run.lose_in_step(STEPS, lost)
        assert run.driver.recover(workers=len(left)).get("step", 0) == at
        assert run.driver.ranks == tuple(left)
    run.goes_on(expected[STAGES], at, STEPS, REL)
    path = run.save(tmp_path, STEPS)
    other = Run(workers, made=model(STAGES), world_size=1)
    assert other.driver.load(path, optimizer=other.optimizer, scheduler=other.scheduler)["step"] == STEPS
    for name, value in run.optimizer.state_dict()["state"].items():
        torch.testing.assert_close(value, other.optimizer.state_dict()["state"][name], rtol=0, atol=0)
    for name, value in run.driver.state_dict().items():
        assert torch.equal(value, other.driver.state_dict()[name]), name


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("point", ["start", "disk", "memory"])
def test_two_replicas_then_one_then_two(workers, expected, tmp_path, point, divided):
    run = Run(workers, made=model(2, False), replicas=2, divide_state=divided)
    if point != "start":
        run.steps(0, 2)
        run.protect(2) if point == "memory" else run.save(tmp_path, 2)
    run.lose_in_step(STEPS, 1)
    at = run.driver.recover(replicas=1).get("step", 0)
    assert run.driver.ranks == (2, 3) and at == (0 if point == "start" else 2)
    run.goes_on(expected[2], at, 4, REL)
    run.protect(4)
    assert run.driver.recover(replicas=2) == {"step": 4}
    assert run.driver.ranks == (2, 3, 0, 1)
    run.goes_on(expected[2], 4, STEPS, REL)


def test_the_replica_that_is_whole_goes_on_though_nobody_had_noticed_the_loss(workers, expected):
    """A stopped worker breaks no connection: it is found when the stages are placed already."""
    run = Run(workers, made=model(2, False), replicas=2)
    run.steps(0, 2)
    run.protect(2)
    run.lose(1, how=signal.SIGSTOP)
    assert run.driver.recover(replicas=1) == {"step": 2}
    assert run.driver.ranks == (2, 3)
    workers.session.timeout = 20.0
    run.goes_on(expected[2], 2, STEPS, REL)


def test_three_replicas_of_one_worker_then_two(workers, expected):
    run = Run(workers, made=model(2, False), replicas=3, world_size=3)
    run.steps(0, 2)
    run.protect(2)
    run.lose_in_step(STEPS, 1)
    assert run.driver.recover(replicas=2) == {"step": 2}
    assert run.driver.replicas == 2 and run.driver.ranks == (0, 2)
    run.goes_on(expected[2], 2, STEPS, REL)


def test_what_is_printed_is_true_of_the_workers_that_are_left(workers):
    run = Run(workers, made=model(STAGES))
    run.lose_in_step(STEPS, 1)
    run.driver.recover(workers=3)
    run.step(0)
    assert repr(workers) == "<Cluster of 3 workers, open: worker0, worker2, worker3; gone: worker1>"
    assert "4 stages on worker0, worker2, worker3>" in repr(run.driver)
    assert str(workers.routes).startswith("worker0, worker2, worker3 on ")
    assert "'worker1': it was lost, and has no process" in workers.dump().splitlines()
    assert [place.pid is None for place in workers.topology.workers] == [False, True, False, False]
    holds = [place.holds.get(run.driver.number) for place in workers.topology.workers]
    assert holds == ["stages 0, 1", None, "stage 2", "stage 3"]
    assert str(run.driver.topology).split() == "stage 0 1 2 3 replica 0 worker0 worker0 worker2 worker3".split()
    assert run.driver.program(4).workers == 3
    counted = run.driver.memory(4, torch.randn(8, 4), torch.randn(8, 1))
    assert counted.program.workers == 3
    with run.driver.record() as recording:
        run.step(1)
    assert [len(each.workers) for each in recording.steps] == [3]
    with pytest.raises(ClusterError, match="'worker1' was lost, and has no process"):
        workers.session.ping(1)
    other = Run(workers, made=model(STAGES))
    assert other.driver.ranks == (0, 2, 3)
    other.step(0)


PROGRAM = make_schedule("zb_h1", workers=4, chunks=4)


@pytest.mark.parametrize(
    "options, warning",
    [
        ({"schedule": "auto"}, ""),
        ({"out_of_order": 4}, ""),  # of a stage on each worker; a worker with two of them holds more
        ({"schedule": PROGRAM}, "on with schedule='1f1b', because .* on these workers: the program needs 4 workers"),
        ({"schedule": "fill_drain", "single_loss": True, "placement": dict(enumerate(range(4)))}, "'fill_drain'"),
    ],
)
def test_drivers_of_all_kinds_go_on(workers, expected, options, warning):
    run = Run(workers, made=model(STAGES), **options)
    run.steps(0, 2)
    run.protect(2)
    run.lose_in_step(STEPS, 3)
    with pytest.warns(PippyWarning, match=warning) if warning else nullcontext():
        run.driver.recover(workers=3)
    run.goes_on(expected[STAGES], 2, STEPS, REL)


def test_limits_of_each_worker_fit_no_other_number_of_workers(workers):
    run = Run(workers, made=model(STAGES), schedule="auto", max_live=[9] * 4)
    run.lose_in_step(STEPS, 3)
    with pytest.raises(DriverError, match=r"has 4 limits for 3 workers.*Give recover\(\) another schedule="):
        run.driver.recover(workers=3)
    assert run.driver.recover(workers=3, schedule="1f1b") == {}
    run.step(0)


def test_a_loss_that_nobody_has_noticed_is_found_by_the_recovery(workers, expected):
    for arguments in ({"workers": 3}, {"workers": [1, 2, 3]}):
        replace_lost_workers(workers, wanted=lambda lost: lost | workers.gone)
        run = Run(workers, made=model(STAGES))
        run.step(0)
        run.protect(1)
        run.lose(0)
        assert run.driver.recover(**arguments) == {"step": 1}
        assert run.driver.ranks == (1, 2, 3) and workers.gone == {0}
        run.goes_on(expected[STAGES], 1, 3, REL)


def test_a_stopped_worker_is_ended(workers, expected):
    run = Run(workers, made=model(STAGES))
    pid = workers.session.workers[2].pid
    run.lose_in_step(0, 2, how=signal.SIGSTOP)
    run.driver.recover(workers=3)
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(pid, 0)
    run.goes_on(expected[STAGES], 0, 2, REL)


def test_other_drivers_recover_by_themselves(workers, expected):
    run, other = Run(workers, made=model(STAGES)), Run(workers, made=model(STAGES))
    third = Run(workers, made=model(2, False), all_ranks=[0, 3])
    run.lose_in_step(STEPS, 1)
    assert run.driver.recover(workers=3) == {}
    with pytest.raises(DriverError, match=r"'worker1' was lost and is gone.*call driver.recover\(\)"):
        other.step(0)
    assert third.driver.recover() == {} and workers.gone == {1}
    third.goes_on(expected[2], 0, 2, REL)
    assert run.driver.recover() == {} and run.driver.ranks == (0, 2, 3) and workers.gone == {1}
    run.goes_on(expected[STAGES], 0, 2, REL)
    assert other.driver.recover(workers=2) == {}
    assert other.driver.ranks == (0, 2) and workers.gone == {1}
    other.goes_on(expected[STAGES], 0, 2, REL)
    other.driver.close()
    last = Run(workers, made=model(2, False), world_size=2)
    last.lose_in_step(STEPS, 0)
    assert last.driver.recover() == {} and workers.gone == {1}
    last.goes_on(expected[2], 0, 2, REL)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"workers": 0}, "workers=0: give how many to go on with, 1 or more"),
        ({"workers": True}, "workers=True: give how many"),
        ({"replicas": 1.5}, "replicas=1.5: give how many"),
        ({"workers": [0, 7]}, r"workers=\[0, 7\]: name workers of the cluster, 0 to 3"),
        ({"workers": 5}, r"5 workers are asked for, and the driver was made for 4; .*workers=\[0, 1, ...\]"),
        ({"workers": 3, "replicas": 2}, "every replica needs the same number of workers; give a multiple of 2"),
        ({"workers": 2, "fewer": True}, "fewer=True goes on with as many workers as can be had"),
        ({"fewer": 3}, "fewer=3: give True"),
        ({"workers": 3, "schedule": "zb_v"}, "schedule='zb_v' needs two stages on each worker"),
        ({"workers": 3, "schedule": "auto"}, "schedule='auto' is for a new driver; leave schedule= out"),
    ],
)
def test_what_is_refused_sends_nothing(workers, arguments, says):
    run = Run(workers, made=model(STAGES), check=False)
    counts, pids = list(workers.session.counts), [each.pid for each in workers.session.workers]
    with pytest.raises(DriverError, match=says):
        run.driver.recover(**arguments)
    assert workers.session.counts == counts and [each.pid for each in workers.session.workers] == pids
    run.step(0)


def test_a_schedule_that_cannot_run_on_fewer_workers_is_replaced_until_there_are_enough(workers, expected):
    run = Run(workers, schedule="zb_v", made=model(STAGES), world_size=2)
    run.step(0)
    run.protect(1)
    run.lose_in_step(STEPS, 0)
    with pytest.warns(
        PippyWarning, match="on with schedule='1f1b', because the driver's own .*zb_v.* two stages on each worker"
    ):
        run.driver.recover(workers=1)
    assert run.driver.schedule == "1f1b"
    run.goes_on(expected[STAGES], 1, 3, REL)
    run.protect(3)
    assert run.driver.recover(workers=2) == {"step": 3}
    assert run.driver.schedule == "zb_v" and run.driver.ranks == (0, 1)
    run.goes_on(expected[STAGES], 3, 4, REL)
    run.protect(4)
    assert run.driver.recover(workers=[2, 3], schedule="interleaved_1f1b") == {"step": 4}
    assert run.driver.schedule == "interleaved_1f1b" and run.driver.ranks == (2, 3)
    run.goes_on(expected[STAGES], 4, STEPS, REL)


def test_a_recovery_that_was_interrupted_is_made_again_on_the_same_workers_or_on_others(workers, expected, monkeypatch):
    run = Run(workers, made=model(STAGES))
    run.step(0)
    run.protect(1)
    run.lose_in_step(STEPS, 1)
    for arguments, left in (({"workers": 3}, (0, 2, 3)), ({"workers": 2}, (0, 2)), ({}, (0, 2))):
        with interrupted_in(monkeypatch, run.driver.programs.commands, "call"):
            run.driver.recover(**arguments)
        assert run.driver.ranks == left
        with pytest.raises(DriverError, match=r"may be half changed; call driver.recover\(\)"):
            run.step(1)
    assert run.driver.recover() == {"step": 1} and run.driver.ranks == (0, 2)
    run.goes_on(expected[STAGES], 1, STEPS, REL)


def test_copies_on_two_workers_that_are_lost_one_after_the_other_are_not_enough_with_one(workers, tmp_path, expected):
    run = Run(workers, made=model(STAGES))
    run.step(0)
    run.save(tmp_path, 1)
    run.step(1)
    run.protect(2)
    run.lose_in_step(STEPS, 1, 2)
    with pytest.warns(PippyWarning, match="goes on from .*step-1; what protect.* of worker 'worker1' was lost"):
        assert run.driver.recover(workers=2)["step"] == 1
    run.goes_on(expected[STAGES], 1, STEPS, REL)


def test_replicas_have_copies_of_each_other(workers, expected):
    """All of a replica is lost, with the copies of one of its workers: the other replica has the same."""
    run = Run(workers, made=model(2, False), replicas=2)
    run.steps(0, 2)
    run.protect(2)
    run.lose_in_step(STEPS, 2, 3)
    assert run.driver.recover() == {"step": 2} and run.driver.replicas == 2
    run.goes_on(expected[2], 2, 3, REL)
    run.lose_in_step(STEPS, 0, 1)
    assert run.driver.recover(fewer=True) == {"step": 2} and run.driver.replicas == 2
    run.goes_on(expected[2], 2, STEPS, REL)


def test_if_no_process_can_be_started_the_run_goes_on_with_those_that_are_left():
    close_open_cluster()
    with local_cluster(3, threads=1, _worker="tests.drivers.model.recovery.unforkable:Worker") as cluster:
        run = Run(cluster)
        before = undisturbed(cluster, STEPS)
        run.driver.recover()
        run.lose_in_step(STEPS, 1)
        with pytest.warns(PippyWarning, match=r"(?s)place of worker 'worker1'.*fewer workers; the run goes on"):
            assert run.driver.recover(fewer=True) == {}
        assert run.driver.ranks == (0, 2) and cluster.gone == {1}
        run.goes_on(before, 0, 2, REL)
        run.protect(2)
        assert run.driver.recover(workers=3) == {"step": 2}  # the next one can be started
        assert run.driver.ranks == (0, 1, 2) and not cluster.gone
        run.goes_on(before, 2, STEPS, REL)
