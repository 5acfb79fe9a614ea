"""What a call that failed says of its worker: a worker that answers a ping after it lives."""

import pickle
import threading
import time

import pytest
import torch

from pippy.drivers.base.errors import ClusterError, WorkerLostError
from pippy.drivers.session.calls import Address, PendingCall
from pippy.drivers.session.session import Session
from pippy.drivers.wire.messages.controller_messages import ControllerConnections
from pippy.drivers.wire.pickling import pickle_message
from tests.drivers.interrupted_everywhere import lost, places


class Pings(Session):
    """A controller without workers, whose pings end as given: with an error, an answer, or not at all."""

    def __init__(self, end):
        super().__init__([Address("worker0", "here", 1)], timeout=0.05)
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
    session, future = Pings(end), torch.futures.Future()
    future.set_exception(RuntimeError("the call broke"))
    with pytest.raises(kind, match=words) as caught:
        session.answer(PendingCall(0, "Step", future))
    assert type(caught.value) is kind
    assert bool(session.broken) is (kind is WorkerLostError)


def test_a_worker_whose_connection_for_messages_breaks_alone_is_lost():
    """One of its two connections was cut, and a ping went through the other: that raised a ClusterError of no worker."""
    session, future = Pings("pong"), torch.futures.Future()
    future.set_exception(ConnectionError("it closed its end of the socket"))
    with pytest.raises(WorkerLostError, match="the connection to it broke: it closed its end of the socket;"):
        session.answer(PendingCall(0, "Command", future))
    assert session.broken


class LostMeanwhile(ControllerConnections):
    """Another thread finds that a worker is lost, while this one waits for it."""

    def wait(self, wakeup, timeout):
        self.session.mark_lost(0, "killed by SIGKILL")


def test_a_wait_says_which_worker_is_lost_though_another_thread_has_found_it():
    """It raised a ClusterError of no worker, so that a script which looks for a lost worker did not find it."""
    messages = LostMeanwhile()
    messages.session = session = Session([Address("worker0", "here", 1)], messages=messages)
    with pytest.raises(WorkerLostError, match=r"worker0.*killed by SIGKILL"):
        session.answer(PendingCall(0, "Step", torch.futures.Future()))
    with pytest.raises(WorkerLostError, match=r"lost a worker and cannot go on.*killed by SIGKILL") as later:
        session.check()  # as at the beginning of a step
    assert (later.value.index, later.value.how) == (0, "killed by SIGKILL")
    assert isinstance(pickle.loads(pickle.dumps(later.value)), WorkerLostError)


class Lid(ControllerConnections):
    """A worker answers a ping once both run again: they are stopped in the wait after it."""

    def __init__(self):
        super().__init__()
        self.waits = []
        self.ping = torch.futures.Future()

    def urgent(self, worker, pickled):
        return self.ping

    def wait(self, wakeup, timeout):
        self.waits.append(timeout)
        time.sleep(0.5 if len(self.waits) == 2 else timeout if len(self.waits) == 1 else 0)
        if len(self.waits) == 3:
            self.ping.set_result(pickle_message("pong"))


def test_time_in_which_the_controller_was_stopped_too_does_not_count():
    """As after the lid of a laptop was closed: the workers have had no time to answer the ping either."""
    lid = Lid()
    session = Session([Address("worker0", "here", 1)], timeout=0.1, interval=0.05, messages=lid)
    calls = [PendingCall(0, "Step", torch.futures.Future())]
    waiting = session.completed(calls, timeout=0.3)
    lid.ping.add_done_callback(lambda _: calls[0].future.set_result(pickle_message("done")))
    assert next(waiting).answer == "done"
    assert not session.broken


def test_ctrl_c_leaves_nobody_waiting_for_a_turn_wherever_it_comes():
    session = Session([Address("worker0", "here", 1)])
    files = "drivers/session/session.py", "session/command_log.py"

    def take_a_turn():
        session.in_turn(lambda: session.in_turn(int), driver=0)

    found = places(take_a_turn, files)
    assert len(found) > 10
    for place in found:
        assert not lost(take_a_turn, files, place)
        assert not session.log.turns


def test_threads_take_turns_in_the_order_in_which_they_came():
    session, order = Session([Address("worker0", "here", 1)]), []

    def take_a_turn(number):
        session.in_turn(lambda: order.append(number))

    def hold():
        for number, thread in enumerate(threads):
            thread.start()
            while len(session.log.turns) < number + 2:
                time.sleep(0)
        order.append("first")

    threads = [threading.Thread(target=take_a_turn, args=(number,)) for number in range(4)]
    session.in_turn(hold)
    for thread in threads:
        thread.join(30)
    assert order == ["first", 0, 1, 2, 3] and not session.log.turns
