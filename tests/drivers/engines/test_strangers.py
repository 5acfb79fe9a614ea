"""Strangers can connect to no local cluster; at the ports of ranks that use RPC they can spoil the start, and later nothing."""

import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.wire.messages.sockets import hang_up_on_strangers
from tests.drivers.processes import (
    HTTP,
    attack,
    come_by_the_thousand,
    descendants,
    half_open,
    listening,
    ports_of,
    say,
    unprobed,
    within,
)
from tests.drivers.torchrun_jobs import ROOT, started, tell

SCRIPT = str(ROOT / "tests/drivers/strangers_script.py")
STANDALONE = ["-m", "tests.drivers.forking_torchrun", "--standalone", "--nproc-per-node"]


def test_no_rank_listens_when_a_cluster_is_open_and_strangers_from_its_start_are_sent_away():
    """RPC reads a length from each connection, and where that is much, ends its process: here from one that came early."""
    with started(*STANDALONE, "2", SCRIPT) as process, ExitStack() as stack:
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[2] == "listening\n", (lines, process.communicate(timeout=20))
        pids = [int(line.split()[-1]) for line in lines[:2]]
        places = ports_of(pids)
        assert [address for address, _ in places] == ["127.0.0.1"] * 2, "as this is one host"
        connects = [partial(socket.create_connection, place, timeout=10) for place in places]
        early = [end for connect in connects for end in stack.enter_context(half_open(connect, 20))]
        tell(process, "")
        assert process.stdout.readline() == "open RPC\n", process.communicate(timeout=20)
        assert not listening(pids)
        with within(5):
            while unprobed(pids):  # what was just sent is not acknowledged yet
                os.sched_yield()
        for end in early:
            say(end, HTTP)
        for place, connect in zip(places, connects):
            attack(connect)
            come_by_the_thousand(place)
        for _ in range(2):
            tell(process, "step")
            assert process.stdout.readline() == "equal to plain training\n", process.communicate(timeout=20)
        tell(process, "end")
        _, error = process.communicate(timeout=20)
        assert process.returncode == 0, error


def test_a_stranger_that_leaves_while_ranks_start_spoils_the_start_which_says_so():
    """RPC lets nobody else in, and ranks 1 and 2 have no connection yet."""
    with started(*STANDALONE, "3", SCRIPT) as process:
        lines = [process.stdout.readline() for _ in range(4)]
        assert lines[3] == "listening\n", (lines, process.communicate(timeout=20))
        pids = [int(line.split()[-1]) for line in lines[:3]]
        for place in ports_of(pids):
            with suppress(ConnectionRefusedError):  # it is closed already
                say(socket.create_connection(place))
        while ports_of(pids):
            os.sched_yield()
        tell(process, "")
        with within(10):
            _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "not all ranks got a connection with each other" in error and "ECONNREFUSED" in error
    assert (
        "If a stranger, as a port scan, connects there meanwhile, RPC lets in nobody else: start the job again" in error
    )


def test_where_something_changes_addresses_on_the_way_nobody_is_taken_for_a_stranger():
    """The rank that has connected says other ends than those that are seen here."""
    with ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ends = [stack.enter_context(socket.create_connection(door.getsockname())) for _ in range(2)]
        there = [stack.enter_context(door.accept()[0]) for _ in ends]
        ranks = [{(end.getsockname(), end.getpeername()) for end in ends}, {(("10.0.0.9", 4711), door.getsockname())}]
        hang_up_on_strangers(door.getsockname()[1], ranks)
        for end in there:
            end.sendall(b"x")
        assert [end.recv(1) for end in ends] == [b"x", b"x"]
        hang_up_on_strangers(door.getsockname()[1], [{(ends[0].getsockname(), ends[0].getpeername())}])
        assert ends[1].recv(1) == b""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.layers[0](x)
        pipe_split()
        x = self.layers[1](x)
        pipe_split()
        return self.layers[2](x)


@pytest.mark.usefixtures("alone")
def test_no_process_of_a_local_cluster_listens_while_it_starts():
    """A port that is open for a moment is enough: what has connected stays connected."""
    seen, over = set(), threading.Event()

    def look():
        while not over.is_set():
            for pid in (os.getpid(), *descendants(os.getpid())):
                with suppress(OSError):  # it has ended
                    seen.update(listening([pid]))
            time.sleep(0.002)

    before = listening([os.getpid(), *descendants(os.getpid())])
    thread = threading.Thread(target=look)
    thread.start()
    try:
        with local_cluster(2, threads=1):
            pass
    finally:
        over.set()
        thread.join()
    assert seen <= before


@pytest.mark.usefixtures("alone")
def test_no_process_of_a_local_cluster_listens():
    """Every account of the host could connect, and have a pickle run."""
    own = socket.create_server(("127.0.0.1", 0))  # one of the script, which stays
    before = listening([os.getpid()])
    with own, local_cluster(3, threads=1) as cluster:
        workers = [address.pid for address in cluster.session.workers]
        assert listening([os.getpid(), os.getsid(workers[0]), *workers]) == before
        model, x = Net().double(), torch.randn(6, 4, dtype=torch.float64)
        drivers = [PipelineDriver1F1B(pipeline(model), cluster, all_ranks=ranks) for ranks in ([0, 1, 2], [2, 0, 1])]
        for driver in drivers:
            torch.testing.assert_close(driver.run(2, x), model(x))
        assert "waits for a command" in cluster.dump()
        assert listening([os.getpid(), os.getsid(workers[0]), *workers]) == before
