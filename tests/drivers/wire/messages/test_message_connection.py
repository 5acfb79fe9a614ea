"""Messages over connections, and to the controller's own process, in order whatever way they take; their queue."""

import os
import select
import socket
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pippy.drivers.wire.messages.controller_messages import ControllerConnections, OwnMessages
from pippy.drivers.wire.messages.worker_messages import (
    LIMIT,
    DeliveryFailure,
    MessageConnection,
    MessageQueue,
    UrgentConnection,
    WorkerMessageConnection,
)
from pippy.drivers.wire.pickling import Pickled, pickle_by_value, pickle_message, unpickle
from pippy.drivers.wire.pollable_event import PollableEvent
from pippy.drivers.wire.worker_transport import WorkerTransport


@pytest.fixture
def wakeup():
    wakeup = PollableEvent()
    yield wakeup
    wakeup.close()


@pytest.fixture
def ends():
    """The controller's connections to two workers, and the workers' ends with their queues."""
    pairs, urgent = ([socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)] for _ in range(2))
    connections = ControllerConnections(
        *({worker: ours for worker, (ours, _) in enumerate(each)} for each in (pairs, urgent))
    )
    workers = []
    for _, theirs in pairs:
        messages = MessageQueue()
        workers.append((WorkerMessageConnection(theirs, messages), messages))
    threads = [UrgentConnection(theirs, int).start() for _, theirs in urgent]
    yield connections, workers
    connections.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for end, messages in workers:
        end.connection.close()
        messages.close()


def serve(worker, times=1):
    """A worker takes so many messages and answers each with itself."""
    end, messages = worker
    for _ in range(times):
        while not len(messages):
            end.connection.step()
        message, reply = messages.get()
        reply(message)
    while end.connection.queue or end.connection.socket_full:  # as the transport does when the socket has room
        select.select([], [end.connection.fd], [], 10)
        end.connection.flush()


def answer(connections, wakeup, future):
    while not future.done():
        connections.wait(wakeup, 5.0)
    return unpickle(future.value())


def test_answers_find_their_questions(ends, wakeup):
    connections, workers = ends
    futures = {
        (w, n): connections.post(w, n, pickle_message((w, n, torch.full((3,), float(n)))))
        for n in range(50)
        for w in range(2)
    }
    for worker in reversed(workers):
        serve(worker, 50)
    for (worker, number), future in futures.items():
        back = answer(connections, wakeup, future)
        assert back[:2] == (worker, number) and torch.equal(back[2], torch.full((3,), float(number)))


def test_a_message_that_came_another_way_keeps_its_place(ends, wakeup):
    connections, workers = ends
    end, messages = workers[0]
    late = connections.post(0, 1, pickle_message("second"))
    while end.connection.step():
        pass
    assert len(messages) == 0  # it waits for the first
    messages.put(0, "first", lambda value: None)
    assert [messages.get().message for _ in range(2)] == ["first", "second"]
    assert not late.done()


def test_a_large_message_has_memory_of_its_own_which_is_not_kept(ends, wakeup):
    connections, workers = ends
    sizes = [1000, LIMIT // 4 + 1, 2000, LIMIT // 4 + 1, LIMIT // 4 + 2, 3000]
    futures = [connections.post(0, n, pickle_message(torch.full((size,), n))) for n, size in enumerate(sizes)]
    serve(workers[0], len(sizes))
    for n, (size, future) in enumerate(zip(sizes, futures)):
        back = answer(connections, wakeup, future)
        assert back.shape == (size,) and (back == n).all()
    for connection in (connections._ends[0].connection, workers[0][0].connection):
        assert connection._out.size < LIMIT and connection._in.size < LIMIT


def test_urgent_messages_are_answered_beside_the_others(ends, wakeup):
    connections, workers = ends
    late = connections.post(1, 0, pickle_message("nobody takes it"))
    futures = [connections.urgent(1, pickle_message(str(n))) for n in range(3)]
    assert [answer(connections, wakeup, future) for future in futures] == [0, 1, 2]
    failure = answer(connections, wakeup, connections.urgent(1, pickle_message("x")))
    assert isinstance(failure, DeliveryFailure) and "ValueError" in failure.text
    assert not late.done()


def test_more_than_the_socket_holds_is_sent_on_while_waiting(ends, wakeup):
    connections, workers = ends
    futures = [
        connections.post(0, n, pickle_message((n, torch.zeros(2000)))) for n in range(2000)
    ]  # 16 MB in packets of a ring
    thread = threading.Thread(target=serve, args=(workers[0], 2000))
    thread.start()
    assert [answer(connections, wakeup, future)[0] for future in futures] == list(range(2000))
    thread.join()


def test_what_cannot_be_read_is_answered_and_does_not_stop_the_rest(ends, wakeup):
    connections, workers = ends
    bad, good = connections.post(0, 0, (b"no pickle", [])), connections.post(0, 1, pickle_message("good"))
    serve(workers[0])
    failure = answer(connections, wakeup, bad)
    assert isinstance(failure, DeliveryFailure) and "UnpicklingError" in failure.text
    assert answer(connections, wakeup, good) == "good"


def test_an_end_that_is_gone(ends, wakeup):
    connections, workers = ends
    future, other = connections.post(0, 0, pickle_message("lost")), connections.post(1, 0, pickle_message("kept"))
    workers[0][0].connection.close()
    with pytest.raises(ConnectionError, match="closed its end"):
        answer(connections, wakeup, future)
    with pytest.raises(ConnectionError):
        connections.post(0, 1, pickle_message("too late"))
    serve(workers[1])
    assert answer(connections, wakeup, other) == "kept"
    connections.wait(wakeup, 0.0)  # what is gone is not looked at again


def test_an_event_ends_the_wait(ends, wakeup):
    connections, _ = ends
    threading.Timer(0.05, wakeup.set).start()
    connections.wait(wakeup, 30.0)


def test_a_connection_carries_numbers_both_ways():
    got = []
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here, there = (
        MessageConnection(end, lambda number, pickled: got.append((number, unpickle(pickled)))) for end in ends
    )
    here.send(3, pickle_message(None))
    there.send(4, pickle_message("x"))
    for end in (there, here):
        while end.connection.step():
            pass
    assert got == [(3, None), (4, "x")]
    here.connection.close()
    there.connection.close()


def test_answers_that_wait_for_room_outlive_a_step_that_is_given_up():
    """Messages have numbers of their own, and not those of steps."""
    got, ends = [], socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    controller, worker = (MessageConnection(end, lambda number, pickled: got.append(number)) for end in ends)
    transport = WorkerTransport(0, controller=worker.connection)
    sent = 0
    while not worker.connection.queue:
        worker.send(sent, pickle_message(bytes(3000)))
        sent += 1
    transport.discard_before(1000000)
    while controller.connection.step() or worker.connection.queue:
        worker.connection.flush()
    assert got == list(range(sent))
    controller.connection.close()
    transport.close()


def test_answers_that_are_given_while_others_wait_for_room_are_given_once():
    """To make room is to read what has arrived, and that may be answered at once: in the middle of sending the queue."""
    got, ends = [], socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here = MessageConnection(ends[0], lambda number, pickled: got.append(number))
    there = MessageConnection(ends[1], lambda number, pickled: there.send(number, pickled))
    there.connection.limit = 1 << 20  # three answers
    there.connection._send_alone = lambda *_: False  # as without memory for those that have no room
    for number in range(4):
        here.send(number, pickle_message(bytes(300_000)))
    while not there.connection.queue:
        there.connection.step()
    while here.connection.step():
        pass
    here.send(4, pickle_message(bytes(300_000)))
    while len(got) < 5 or there.connection.queue:
        for end in (there, here):
            end.connection.flush()
            while end.connection.step():
                pass
    assert sorted(got) == list(range(5))
    here.connection.close()
    there.connection.close()


@pytest.fixture
def messages():
    messages = MessageQueue()
    yield messages
    messages.close()


def readable(messages):
    return bool(select.select([messages], [], [], 0)[0])


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_any_order_of_arrival_is_put_right(order, skipped):
    messages, expected = MessageQueue(), iter([number for number in range(8) if number not in skipped])
    arrived, taken = set(), 0
    for number in order:
        messages.skip(number) if number in skipped else messages.put(number, number, print)
        arrived.add(number)
        while readable(messages):
            assert messages.get().message == next(expected)
            taken += 1
        assert len(messages) == 0
        through = next(n for n in range(9) if n not in arrived)
        assert taken == len(set(range(through)) - skipped)
    assert next(expected, None) is None
    messages.close()


def test_get_waits_for_another_thread(messages):
    taken = []
    thread = threading.Thread(target=lambda: taken.append(messages.get().message))
    thread.start()
    messages.put(0, "came", print)
    thread.join(10)
    assert taken == ["came"]


def test_many_threads_fill_it(messages):
    def fill(start):
        for number in range(start, 1000, 4):
            messages.put(number, number, print)

    threads = [threading.Thread(target=fill, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    assert [messages.get().message for _ in range(1000)] == list(range(1000))
    for thread in threads:
        thread.join()
    assert not readable(messages)


def test_closing_gives_the_descriptor_back():
    messages = MessageQueue()
    fd = messages.fileno()
    messages.close()
    with pytest.raises(OSError):
        os.fstat(fd)


def storages(value):
    return {each.untyped_storage().data_ptr() for each in value}


def test_tensors_are_copied_once_each_way_and_keep_what_they_are(messages, monkeypatch):
    own = OwnMessages(messages, str)
    given = [torch.randn(2, 3).t(), torch.randn(4, dtype=torch.bfloat16)[::2], torch.ones(2, requires_grad=True)]
    future = own.post(0, pickle_message({"tensors": given, "code": pickle_by_value(lambda: given[0])}))
    delivery = messages.get()
    taken = delivery.message["tensors"]
    for one, other in zip(given, taken, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype and one.requires_grad == other.requires_grad
    assert taken[0].stride() == (1, 3) and taken[1].is_contiguous()
    assert not storages(given) & storages(taken)
    assert torch.equal(unpickle(delivery.message["code"])(), given[0])
    weight = torch.nn.Parameter(torch.ones(3))
    delivery.reply({"weight": weight})
    answer = unpickle(future.value())["weight"]
    with torch.no_grad():
        weight.zero_()
    assert answer.sum() == 3


@pytest.mark.parametrize("around", [torch.inference_mode(), torch.no_grad(), torch.device("meta")])
def test_what_is_around_the_call_in_the_script_does_not_reach_the_worker(messages, around):
    with around:
        OwnMessages(messages, str).post(0, pickle_message(torch.ones(2, device="cpu")))
    taken = messages.get().message
    assert not taken.is_inference() and taken.device.type == "cpu"
    (taken * torch.ones(2, requires_grad=True)).sum().backward()


def test_one_that_cannot_be_unpickled_is_answered_so_and_those_behind_it_go_on(messages):
    own = OwnMessages(messages, answer=int)
    failed = own.post(0, Pickled(b"no pickle", []))
    assert isinstance(unpickle(failed.value()), DeliveryFailure)
    own.post(1, pickle_message("next"))
    assert messages.get().message == "next"
    assert "ValueError" in unpickle(own.urgent(pickle_message("x")).value()).text
