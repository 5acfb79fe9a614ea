"""Messages over lines: in order, whatever way each takes; large ones, and ends that are gone."""

import select
import socket
import threading

import pytest
import torch

from pippy.drivers.transport.bell import Bell
from pippy.drivers.transport.inbox import Inbox
from pippy.drivers.transport.line import LARGE, Answering, Line
from pippy.drivers.transport.lines import Lines
from pippy.drivers.transport.shared_memory import SharedMemoryTransport
from pippy.drivers.transport.wire import Undone, pack, unpack


@pytest.fixture
def bell():
    bell = Bell()
    yield bell
    bell.close()


@pytest.fixture
def ends():
    """The controller's lines to two workers, and the workers' ends with their inboxes."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    lines = Lines([ours for ours, _ in pairs])
    workers = []
    for index, (_, theirs) in enumerate(pairs):
        inbox = Inbox()
        large = lambda number, packed, index=index: lines.answered(index, number, packed)  # noqa: E731
        workers.append((Answering(theirs, inbox, large), inbox))
    yield lines, workers
    lines.close()
    for line, inbox in workers:
        line.channel.close()
        inbox.close()


def serve(worker, times=1):
    """A worker takes so many messages and answers each with itself."""
    line, inbox = worker
    for _ in range(times):
        while not len(inbox):
            line.channel.step()
        message, reply = inbox.get()
        reply(message)
    while line.channel.queue or line.channel.socket_full:  # as the transport does when the socket has room
        select.select([], [line.channel.fd], [], 10)
        line.channel.flush()


def answer(lines, bell, future):
    while not future.done():
        lines.wait(bell, 5.0)
    return unpack(future.value())


def test_answers_find_their_questions(ends, bell):
    lines, workers = ends
    futures = {(w, n): lines.post(w, n, pack((w, n, torch.full((3,), float(n))))) for n in range(50) for w in range(2)}
    for worker in reversed(workers):
        serve(worker, 50)
    for (worker, number), future in futures.items():
        back = answer(lines, bell, future)
        assert back[:2] == (worker, number) and torch.equal(back[2], torch.full((3,), float(number)))


def test_a_message_that_came_another_way_keeps_its_place(ends, bell):
    lines, workers = ends
    line, inbox = workers[0]
    late = lines.post(0, 1, pack("second"))
    while line.channel.step():
        pass
    assert len(inbox) == 0  # it waits for the first
    inbox.put(0, "first", lambda value: None)
    assert [inbox.get().message for _ in range(2)] == ["first", "second"]
    assert not late.done()


def test_large_messages_are_refused_and_large_answers_go_another_way(ends, bell):
    lines, workers = ends
    assert lines.carry(pack(torch.zeros(LARGE // 4 - 1000))) and not lines.carry(pack(torch.zeros(LARGE // 4 + 1)))
    future = lines.post(0, 0, pack("give me much"))
    line, inbox = workers[0]
    while not len(inbox):
        line.channel.step()
    inbox.get().reply(torch.ones(LARGE // 4 + 1))
    assert answer(lines, bell, future).sum() == LARGE // 4 + 1
    assert line.channel._rings_made == 0


def test_more_than_the_socket_holds_is_sent_on_while_waiting(ends, bell):
    lines, workers = ends
    futures = [lines.post(0, n, pack((n, torch.zeros(2000)))) for n in range(2000)]  # 16 MB in packets of a ring
    thread = threading.Thread(target=serve, args=(workers[0], 2000))
    thread.start()
    assert [answer(lines, bell, future)[0] for future in futures] == list(range(2000))
    thread.join()


def test_what_cannot_be_read_is_answered_and_does_not_stop_the_rest(ends, bell):
    lines, workers = ends
    bad, good = lines.post(0, 0, (b"no pickle", [])), lines.post(0, 1, pack("good"))
    serve(workers[0])
    undone = answer(lines, bell, bad)
    assert isinstance(undone, Undone) and "UnpicklingError" in undone.text
    assert answer(lines, bell, good) == "good"


def test_an_end_that_is_gone(ends, bell):
    lines, workers = ends
    future, other = lines.post(0, 0, pack("lost")), lines.post(1, 0, pack("kept"))
    workers[0][0].channel.close()
    with pytest.raises(ConnectionError, match="closed its end"):
        answer(lines, bell, future)
    with pytest.raises(ConnectionError):
        lines.post(0, 1, pack("too late"))
    serve(workers[1])
    assert answer(lines, bell, other) == "kept"
    lines.wait(bell, 0.0)  # what is gone is not looked at again


def test_a_bell_ends_the_wait(ends, bell):
    lines, _ = ends
    threading.Timer(0.05, bell.ring).start()
    lines.wait(bell, 30.0)


def test_a_line_carries_numbers_both_ways():
    got = []
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here, there = (Line(end, lambda number, packed: got.append((number, unpack(packed)))) for end in ends)
    here.send(3, pack(None))
    there.send(4, pack("x"))
    for end in (there, here):
        while end.channel.step():
            pass
    assert got == [(3, None), (4, "x")]
    here.channel.close()
    there.channel.close()


def test_answers_that_wait_for_room_outlive_a_step_that_is_given_up():
    """Messages have numbers of their own, and not those of steps."""
    got, ends = [], socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    controller, worker = (Line(end, lambda number, packed: got.append(number)) for end in ends)
    transport = SharedMemoryTransport(0, {}, line=worker.channel)
    sent = 0
    while not worker.channel.queue:
        worker.send(sent, pack(bytes(3000)))
        sent += 1
    transport.forget(below=1000000)
    while controller.channel.step() or worker.channel.queue:
        worker.channel.flush()
    assert got == list(range(sent))
    controller.channel.close()
    transport.close()
