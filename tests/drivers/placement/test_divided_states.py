"""Replicas whose optimizers have each a part of the state, and the run after a worker was lost."""

import os
import signal

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B
from pippy.drivers.base.errors import OptimizerError, WorkerLostError
from pippy.drivers.engines.local.local_cluster import local_cluster
from tests.comparisons import update
from tests.drivers.placement.test_replicas import (
    Plain,
    batch,
    check_replicas_are_equal,
    check_state,
    cut_in_two,
    expected_of_twins,
    sent_to_twins,
    while_worker_1_waits,
)
from tests.drivers.processes import within

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def states(cluster, driver):
    """The bytes of optimizer states on each worker."""
    held = []
    for thread in cluster.engine.workers:
        of_driver = thread.drivers.get(driver.number)
        own = of_driver.optimizers.values() if of_driver else ()
        held.append(sum(tensor.nbytes for each in own for state in each.held() for tensor in state.values()))
    return held


def test_a_divided_state_is_there_once_and_the_numbers_are_the_same(threads, tmp_path):
    x, target = batch(8)
    whole, divided = (PipelineDriver1F1B(cut_in_two(), threads, replicas=2) for _ in range(2))
    groups = [{"params": "*.weight", "lr": 0.1}, {"params": ..., "weight_decay": 0.0}]
    first = whole.instantiate_optimizer(torch.optim.AdamW, param_groups=groups)
    second = divided.instantiate_optimizer(torch.optim.AdamW, param_groups=groups, divide_state=True)
    for step in range(4):
        norms = []
        for driver, optimizer in ((whole, first), (divided, second)):
            driver.run(4, x, target)
            if step == 2:
                driver.run(4, x + 1, target)
            norms.append(driver.clip_grad_norm_(0.01))
            update(optimizer)
        assert norms[0] == norms[1]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, divided.state_dict()[name]), name
    check_replicas_are_equal(divided)
    twice, once = states(threads, whole), states(threads, divided)
    for driver, held in ((whole, twice), (divided, once)):
        assert [each.peak.optimizer for each in driver.memory(4, x, target).workers] == held, "as it is counted"
    assert sum(twice) == 2 * sum(once) and max(once) < 0.75 * max(twice)
    ours, theirs = first.state_dict()["state"], second.state_dict()["state"]
    assert all(torch.equal(value, theirs[name][key]) for name, own in ours.items() for key, value in own.items())
    path = divided.save(tmp_path, optimizer=second, step=1)
    for driver, optimizer in ((whole, first), (divided, second)):
        driver.load(path, optimizer=optimizer)
        driver.run(4, x, target)
        optimizer.step()
    second.load_state_dict(first.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(value, divided.state_dict()[name]), name
    assert states(threads, divided) == once
    for driver in (whole, divided):
        driver.close()


def test_with_a_divided_state_gradients_go_one_way_and_parameters_the_other(threads):
    driver = PipelineDriver1F1B(cut_in_two(), threads, replicas=2)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, divide_state=True)
    *_, last = sent_to_twins(threads, driver, optimizer, 2)
    assert last == expected_of_twins()


def test_optimizers_of_which_one_is_divided(cluster):
    x, target = batch(8)
    driver, plain = PipelineDriver1F1B(cut_in_two(), cluster, replicas=2), Plain()
    ours = [
        driver.instantiate_optimizer(torch.optim.Adam, lr=0.1, param_groups=[{"params": "*.bias"}], divide_state=True),
        driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, param_groups=[{"params": "*.weight"}]),
    ]
    named = dict(plain.named_parameters())
    theirs = [
        torch.optim.Adam([each for name, each in named.items() if "bias" in name], lr=0.1),
        torch.optim.SGD([each for name, each in named.items() if "weight" in name], lr=0.1),
    ]
    for step in range(3):
        driver.run(4, x, target)
        nn.functional.mse_loss(plain(x), target).backward()
        for each in (ours[step % 2], theirs[step % 2]):  # the gradients of the other are kept
            update(each)
        for name, parameter in named.items():
            gradient = driver.get_grad(name)
            assert (gradient is None) == (parameter.grad is None)
            if gradient is not None:
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-12)
    check_state(driver, plain)
    check_replicas_are_equal(driver)


def test_a_state_cannot_be_divided_among_one(cluster):
    driver = PipelineDriver1F1B(cut_in_two(), cluster)
    with pytest.raises(OptimizerError, match="this driver has one pipeline; make it with replicas=2"):
        driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, divide_state=True)
    with pytest.raises(OptimizerError, match="divide_state=2: give True"):
        driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, divide_state=2)


def test_a_run_goes_on_after_a_worker_of_the_second_replica_was_lost(alone, tmp_path):
    x, target = batch(8)
    found = []
    with local_cluster(4, threads=1) as workers:
        for lost in (False, True):
            driver = PipelineDriver1F1B(cut_in_two(), workers, replicas=2)
            optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1, divide_state=True)
            for step in range(3):
                driver.run(4, x, target)
                update(optimizer)
                if step == 1 and lost:
                    driver.save(tmp_path, optimizer=optimizer, step=step)
                    what = r"waits for (gradients|sum) of stage 1 part \d of step \d+, from worker 3"
                    with while_worker_1_waits(workers, driver, x, target, what) as running, within(5.0):
                        os.kill(workers.session.workers[3].pid, signal.SIGKILL)
                        with pytest.raises(WorkerLostError, match="worker3"):
                            running.result()
                    assert driver.recover() == {"step": 1}
            check_replicas_are_equal(driver)
            found.append(driver.state_dict())
            driver.close()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
