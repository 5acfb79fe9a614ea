"""When a local cluster stands, nobody can connect to any of its processes."""

import os
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.engines.local.local_cluster import local_cluster
from tests.drivers.processes import descendants, listening


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
