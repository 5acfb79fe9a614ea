"""A script for torchrun on one machine whose ranks take themselves for those of several hosts, as HOSTS names them.

It trains on a cluster in which some workers share memory and some do not; steps fail; at the end a worker is killed. Every
rank says with whom it has a connection of TCP. None uses RPC.
"""

import copy
import os
import signal
import sys

import pytest
import torch
from torch.distributed import rpc
from torch.nn import functional as F

import pippy
from exps.tried_models.residual_streams import AttentionResiduals
from pippy import PipelineDriver
from pippy.drivers.base.errors import StepError, WorkerLostError
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.wire.messages.controller_messages import ControllerConnections
from pippy.drivers.wire.worker_transport import WorkerTransport
from tests.drivers.failing_model import (
    BACKWARD,
    EXIT,
    FORWARD,
    UNREADABLE,
    UNSENDABLE,
    Training,
    Trapped,
    no_orders,
    trapped_pipe,
)
from tests.drivers.processes import listening, stop, until, within
from tests.drivers.scarce import NO_DESCRIPTORS, NO_SHARED_MEMORY
from tests.drivers.thread_cluster import thread_cluster

SCHEDULES = ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v"]  # one of each placement; the last begins at both ends
called: set[int] = set()


def gradients_of(cluster, schedule, plain):
    """What a step of a schedule gives: the loss and the gradients."""
    driver = PipelineDriver(trapped_pipe(copy.deepcopy(plain)), cluster, schedule=schedule)
    torch.manual_seed(5)
    loss = driver.run(8, torch.randn(11, 8), no_orders(11), torch.randn(11, 8))
    found = {"loss": loss, **driver.gradients()}
    driver.close()
    return found


def train(cluster, threads, schedule):
    """Every bit as among workers that are threads of this process; and as plain PyTorch gives it."""
    each = REGISTRY[schedule]
    stages = 2 if each.placement == "looped" else each.stages_per_worker
    plain = Trapped(stages * len(cluster))
    mine, theirs = (gradients_of(workers, schedule, plain) for workers in (cluster, threads))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine), schedule
    torch.manual_seed(5)
    x, target = torch.randn(11, 8), torch.randn(11, 8)
    F.mse_loss(plain(x, no_orders(11)), target).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-10, atol=1e-13)


def hand_on(cluster, threads):
    """Values go once to the other host, and are handed on there; every bit as among threads, which are on one."""
    model, x, found = AttentionResiduals(len(cluster)), torch.randn(8, 8), []
    for workers in (cluster, threads):
        pipe = pippy.pipeline(copy.deepcopy(model), torch.nn.MSELoss())
        driver = PipelineDriver(pipe, workers, schedule="1f1b", check=False)
        with driver.record() as recording:
            loss = driver.run(4, x, x)
        hosts, sent = workers.hosts_of(range(len(workers))), recording.steps[-1].traffic()
        assert driver.program(4).hosts == hosts
        crossed = [each for each in sent if "grad" not in each.value and hosts and hosts[each.source] != hosts[each.to]]
        found.append(({"loss": loss, **driver.gradients()}, hosts, sum(each.times for each in crossed) / 4))
        driver.close()
    (mine, *between), (theirs, *here) = found
    assert between == [(0, 0, 1, 1), 2] and here == [None, 0], (between, here)
    assert all(value is theirs[name] or torch.equal(value, theirs[name]) for name, value in mine.items())


FAULTS = {  # where and how: workers 0 and 1 share memory, 1 and 2 do not, 2 and 3 do
    "a forward that fails": [(FORWARD, 2), (FORWARD, 3)],
    "a backward that fails": [(BACKWARD, 1)],
    "a forward that leaves": [(EXIT, 0)],
    "could not be read|no number": [(UNREADABLE, 0), (UNREADABLE, 1), (UNREADABLE, 2)],
    "an opaque value stays where it is": [(UNSENDABLE, 0), (UNSENDABLE, 1), (UNSENDABLE, 2)],
}


def fail(cluster):
    """Steps that fail, each after a good one and before a good one."""
    training = Training(cluster)
    for words, places in FAULTS.items():
        for how, trap in places:
            with within(4.0), pytest.raises(StepError, match=words):
                training.fail(how, trap)
            training.check()
    for how, trap in ((NO_DESCRIPTORS, 1), (NO_DESCRIPTORS, 2), (NO_SHARED_MEMORY, 0), (NO_SHARED_MEMORY, 2)):
        try:
            training.fail(how, trap)
        except StepError:
            training.check()
        else:  # values of this size need neither
            training.driver.zero_grad()
            training.plain.zero_grad()
    return training


def lose_a_worker(cluster, training):
    """Which torchrun sees, too: a tenth of a second later it tells the other ranks to end. This one has more to say."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    victim = cluster.session.workers[3]
    stop(victim.pid)  # or the step might be over before
    running = training.start()
    with within(3.0), pytest.raises(WorkerLostError, match="'worker3'"):
        os.kill(victim.pid, signal.SIGKILL)
        running.result()


def tell_of_posts():
    """Print to whom the controller sends messages over a socket."""
    inner = ControllerConnections._send

    def told(connections, at, number, pickled):
        worker = next(
            worker for found in (connections._at, connections._urgent_at) for worker in found if found[worker] == at
        )
        if worker not in called:
            called.add(worker)
            print(f"socket {worker}\n", end="", flush=True)
        return inner(connections, at, number, pickled)

    ControllerConnections._send = told


def tell_of_connections():
    """Print to whom this process gets a connection."""
    inner = WorkerTransport.add_far

    def told(transport, peer, end):
        print(f"TCP {os.environ['RANK']} {peer}\n", end="", flush=True)
        inner(transport, peer, end)

    WorkerTransport.add_far = told


tell_of_connections()
tell_of_posts()
os.environ["PIPPY_HOST"] = os.environ["HOSTS"].split()[int(os.environ["RANK"])]
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
with pippy.cluster(threads=1, timeout=60.0) as cluster:
    pids = [address.pid for address in cluster.session.workers]
    print(f"{cluster.routes}\nready {' '.join(map(str, pids))}\n", end="", flush=True)
    sys.stdin.readline()
    with thread_cluster(4) as threads:
        for schedule in SCHEDULES:
            train(cluster, threads, schedule)
    assert not rpc._is_current_rpc_agent_set()
    assert until(lambda: not listening(pids)), "the ports for connections of TCP are closed when they stand"
    with thread_cluster(4) as threads:
        hand_on(cluster, threads)
    training = fail(cluster)
    lose_a_worker(cluster, training)
    print("lost\n", end="", flush=True)
