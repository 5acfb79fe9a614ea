"""Workers that send each other values by RPC: what is lost on the way is an error, soon, and never a wait without an end."""

import threading

import pytest
import torch

from pippy.drivers.base.errors import ClusterError, StepError, WorkerLostError
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.wire.messages.rpc import RpcValues
from tests.drivers.failing_model import CUT, SILENCE, UNREADABLE
from tests.drivers.processes import within
from tests.drivers.test_failures import Training

pytestmark = pytest.mark.usefixtures("in_float64", "seeded", "alone")


def test_what_is_lost_between_two_workers():
    with local_cluster(2, threads=1, timeout=20.0, transport="rpc") as cluster:
        training = Training(cluster)
        training.step()
        with (
            within(2.0),
            pytest.raises(StepError, match=r"getitem_3 of micro-batch 1, from worker 0, could not be read: ValueError"),
        ):
            training.fail(UNREADABLE)
        training.check()
        lost = r"is lost: worker 'worker\d' (could not send it a value: the connection broke|found the connection)"
        with within(4.0), pytest.raises(WorkerLostError, match=lost):
            training.fail(CUT)
        with pytest.raises(
            ClusterError, match=r"no other process can take its place: .* connected by RPC.*; open another"
        ):
            training.driver.recover()
    # A worker finds it after timeout + 2 s, and only a worker that stalls for seconds after 4 × timeout, as the kernel does.
    with local_cluster(2, threads=1, timeout=3.0, transport="rpc") as cluster:
        cluster.session.timeout = 20.0  # one of the workers finds it first
        training = Training(cluster)
        training.step()
        late = r"is lost: worker 'worker\d' (could not send it a value: it has not taken up .* within 5 s|found the connection)"
        with within(7.0), pytest.raises(WorkerLostError, match=late):
            training.fail(SILENCE)


class Watched:
    """Values that are said to be on their way, and what is said of peers that were lost."""

    def __init__(self):
        self.lost, self.was_lost = [], threading.Event()
        self.values = RpcValues(str, self.note, seconds=0.1)

    def note(self, peer, how):
        self.lost.append((peer, how))
        self.was_lost.set()

    def sent(self, peer, size=8):
        future = torch.futures.Future()
        self.values.watch(peer, size, future)
        return future


def test_a_value_that_nobody_takes_up_is_a_lost_peer():
    """A connection that is cut without a word, as by a cable: TCP itself would try on for a quarter of an hour."""
    watched = Watched()
    watched.sent(1).set_result(None)
    slow, stuck = watched.sent(2, size=1 << 30), watched.sent(3)
    with within(1.0):
        assert watched.was_lost.wait(10)
    assert watched.lost == [(3, "it has not taken up a value of 8 bytes within 0.1 s")]
    stuck.set_exception(RuntimeError("too late"))
    assert len(watched.lost) == 1
    slow.set_exception(RuntimeError("eof\nC++ traceback"))
    assert watched.lost[1:] == [(2, "the connection broke: eof")]


def test_connections_that_break_at_the_end_are_no_loss():
    watched = Watched()
    future = watched.sent(1)
    watched.values.end()
    future.set_exception(RuntimeError("eof"))
    assert not watched.lost
