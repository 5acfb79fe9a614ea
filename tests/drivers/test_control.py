"""What a call that failed says of its worker: a worker that answers a ping after it lives."""

import pytest
import torch

from pippy.drivers.control.control import Address, Control, PendingCall
from pippy.drivers.errors import ClusterError, WorkerLostError
from pippy.drivers.transport.pickling import pickle_message


class Pings(Control):
    """A controller without workers, whose pings end as given: with an error, an answer, or not at all."""

    def __init__(self, end):
        super().__init__([Address("worker0", "rpc0", "here", 1)], timeout=0.05)
        self.end = end

    def ping(self, worker):
        future = torch.futures.Future()
        if isinstance(self.end, Exception):
            future.set_exception(self.end)
        elif self.end is not None:
            future.set_result(pickle_message(self.end))
        return PendingCall(worker, "ping", future)


ENDS = [
    ("pong", ClusterError, "^a call to worker 0 .Step. failed:\nthe call broke$"),
    (RuntimeError("refused\nby the peer"), WorkerLostError, "the call broke, and a ping failed: by the peer"),
    (None, WorkerLostError, "the call broke, and it left a ping unanswered for 0.05 s"),
]


@pytest.mark.parametrize(("end", "kind", "words"), ENDS)
def test_a_call_that_failed(end, kind, words):
    """Whatever a ping raised was dropped, so nobody could see why its worker was taken for lost."""
    control, future = Pings(end), torch.futures.Future()
    future.set_exception(RuntimeError("the call broke"))
    with pytest.raises(kind, match=words) as caught:
        control.wait(PendingCall(0, "Step", future))
    assert type(caught.value) is kind
    assert bool(control.broken) is (kind is WorkerLostError)
