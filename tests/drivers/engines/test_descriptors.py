"""How many file descriptors a cluster takes: they grow with the pairs of workers that a program uses."""

import copy
import socket
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pippy import PipelineDriver1F1B, PipelineDriverInterleaved1F1B, local_cluster, pipeline
from pippy.drivers.base.errors import ClusterError
from pippy.drivers.session.calls import Address
from pippy.drivers.session.session import Session
from pippy.drivers.wire.messages.controller_messages import ControllerConnections
from pippy.drivers.wire.messages.worker_messages import MessageConnection, MessageQueue, WorkerMessageConnection
from pippy.drivers.wire.worker_transport import WorkerTransport
from tests.drivers.models import Chain
from tests.drivers.processes import few_descriptors, links, open_descriptors

WORKERS = 6
pytestmark = pytest.mark.usefixtures("in_float64", "seeded", "alone")


def sockets(pid):
    """How many sockets a process has."""
    return sum(each.startswith("socket:") for each in links(Path(f"/proc/{pid}/fd")))


def trains_as_plain(driver, plain):
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    driver.run(4, x, target)
    plain.zero_grad()
    F.mse_loss(plain(x), target).backward()
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_descriptors_grow_with_the_pairs_that_a_program_uses():
    """64 workers start where 1,024 descriptors are allowed; here the same on a smaller scale: 6 with some 30."""
    with few_descriptors(12 + 3 * WORKERS), local_cluster(WORKERS, threads=1) as cluster:
        pids = [worker.pid for worker in cluster.session.workers]
        assert len({before := sockets(pid) for pid in pids}) == 1
        plain = Chain(WORKERS)
        pipe = pipeline(copy.deepcopy(plain), F.mse_loss)
        driver = PipelineDriver1F1B(pipe, cluster)
        trains_as_plain(driver, plain)
        assert [sockets(pid) - before for pid in pids] == [1, *[2] * (WORKERS - 2), 1]
        again = PipelineDriver1F1B(pipe, cluster)
        trains_as_plain(again, plain)
        assert [sockets(pid) - before for pid in pids] == [1, *[2] * (WORKERS - 2), 1]
        first = PipelineDriverInterleaved1F1B(pipe, cluster, all_ranks=[0, 2, 4], stages_per_worker=2)
        trains_as_plain(first, plain)
        assert [sockets(pids[at]) - before for at in (0, 2, 4)] == [3, 4, 4]


def test_too_few_descriptors_to_start_are_said_to_be_too_few():
    open_now = open_descriptors()
    for free in (0, 3, 10, 2 * WORKERS):
        with (
            few_descriptors(free),
            pytest.raises(ClusterError, match=r"no free file descriptor for (6 workers|memory).*ulimit -n"),
        ):
            local_cluster(WORKERS, threads=1)
        assert open_descriptors() == open_now


def test_a_controller_without_a_descriptor_says_so_and_connects_two_workers_later():
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    connections = ControllerConnections({worker: ours for worker, (ours, _) in enumerate(pairs)})
    ends = [WorkerMessageConnection(theirs, MessageQueue()).connection for _, theirs in pairs]
    first, second = (WorkerTransport(index, controller=end) for index, end in enumerate(ends))
    session = Session([Address(name, "here", 1) for name in "ab"], messages=connections)
    for free in (0, 1):
        with (
            few_descriptors(free),
            pytest.raises(OSError, match=r"no free file descriptor for a socket between workers.*ulimit -n"),
        ):
            session.connect(0, {1})
    session.connect(0, {1})
    first.send(1, (0, 0, 0), torch.ones(2))
    assert second.receive((0, 0, 0), 0).sum() == 2
    for each in (first, second, connections):
        each.close()


def test_a_worker_without_a_descriptor_for_its_peer_says_so():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    controller = MessageConnection(here, lambda *_: None)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = WorkerTransport(0, controller=WorkerMessageConnection(there, MessageQueue()).connection)
    controller.connection.send_end(1, one)
    with few_descriptors(0):
        worker.ready((0, 0, 0))
    for use in (lambda: worker.send(1, (0, 0, 0), None), lambda: worker.receive((0, 0, 0), 1)):
        with pytest.raises(OSError, match=r"no free file descriptor for the socket to worker 1.*ulimit -n"):
            use()
    for each in (worker, controller.connection, other):
        each.close()
