"""Joining ends, with an error that says what to do, when the others cannot be reached or are gone."""

import os
import signal
import socket

from torch.distributed import TCPStore

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.routes import Routes
from pippy.drivers.engines.torchrun.interfaces import link_named
from pippy.drivers.engines.torchrun.meeting import Meeting
from pippy.drivers.engines.torchrun.ranks import RankBoard, RankInfo
from pippy.drivers.engines.torchrun.torchrun import _join
from tests.drivers.processes import watched, within


def test_ctrl_c_ends_a_rank_that_waits_for_the_others():
    """It waited to the end of start_timeout, unless the store of torchrun ended before."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            board = RankBoard(TCPStore("127.0.0.1", store.port, is_master=False), 1, 60.0)
            board.write("host of", "a")
            board.read("host of", [0])
        except KeyboardInterrupt:
            os.write(writing, b"interrupted")
        finally:
            os._exit(0)
    os.close(writing)
    with watched(pid), within(10), open(reading) as told:
        assert store.get("host of 1") == b'"a"'
        os.kill(pid, signal.SIGINT)
        assert told.read().endswith("interrupted")
    os.waitpid(pid, 0)


def test_a_rank_that_others_do_not_connect_with_does_not_wait_for_ever(monkeypatch):
    """It has met them at the store, that of torchrun. RPC alone would wait for 24 days. In another process: it half joins."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            _join(RankInfo(0, 2, 0, 2, True), Meeting([], Routes((), (), ()), store, link=link_named("lo")), 5.0, 1.0)
        except ClusterError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with watched(pid), within(8), open(reading) as told:
        text = told.read()
    os.waitpid(pid, 0)
    assert "rank 0 has met the others" in text
    assert "start_timeout (1 s)" in text and "of the interface lo" in text and "TP_SOCKET_IFNAME" in text
