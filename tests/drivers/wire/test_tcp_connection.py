"""Values between two workers that share no memory. That they arrive as they were is tested for all ways: test_transports.py."""

import queue
import select
import socket
import struct
from contextlib import ExitStack

import pytest
import torch

from pippy.drivers.base.errors import PeerLost
from pippy.drivers.wire.messages.doors import Door, come_in
from pippy.drivers.wire.messages.sockets import break_when_silent
from pippy.drivers.wire.packet import LAYOUTS
from pippy.drivers.wire.received_values import ReceivedValues
from pippy.drivers.wire.tcp_connection import TcpConnection
from pippy.drivers.wire.worker_transport import WorkerTransport
from tests.drivers.processes import within
from tests.drivers.scarce import let_nothing_in


@pytest.fixture
def pair():
    with ExitStack() as stack:
        made = connected(stack)
        yield made


def tcp(stack, seconds=5.0):
    """Two ends of a connection, made at a door."""
    taken = queue.SimpleQueue()
    door = Door("127.0.0.1", [1], lambda _, end: taken.put(end), seconds)
    guest = come_in(door.invitation, 1, seconds)
    host = taken.get(timeout=10)
    for end in (guest, host):
        break_when_silent(end, seconds / 3, seconds)
        stack.callback(end.close)
    return guest, host


def connected(stack):
    ends = [TcpConnection(end, ReceivedValues(), [].append) for end in tcp(stack)]
    for each in ends:
        stack.callback(each.received.close)
        stack.callback(each.close)
    return ends


def read(connection, key):
    """Wait until a value is there."""
    received = connection.received
    with within(10):
        while not received.has(key):
            select.select([received.wakeup], [], [], 10)
            received.woken()
    return received.take(key)


@pytest.mark.parametrize(("size", "count"), [(1 << 20, 8), (5000, 50)])
def test_a_send_does_not_wait_for_a_receiver_that_reads_nothing_and_all_arrives_in_order(size, count):
    with ExitStack() as stack:
        first, second = tcp(stack)
        for end, buffer in ((first, socket.SO_SNDBUF), (second, socket.SO_RCVBUF)):
            end.setsockopt(socket.SOL_SOCKET, buffer, 1 << 16)
        here = TcpConnection(first, ReceivedValues(), [].append)
        stack.callback(here.received.close)
        stack.callback(here.close)
        value = torch.arange(size, dtype=torch.float64)
        with within(5):
            for number in range(count):
                here.send((0, number, 0), value)
                here.send((0, number, 1), torch.tensor(number))
                value += 1  # what was sent is a copy
        order = []
        there = TcpConnection(second, ReceivedValues(), [].append)
        stack.callback(there.received.close)
        stack.callback(there.close)
        for number in range(count):
            got = read(there, (0, number, 0))
            assert torch.equal(got, torch.arange(size, dtype=torch.float64) + number)
            order.append(read(there, (0, number, 1)).item())
        assert order == [*range(count)]


def test_a_small_value_takes_one_call_to_send_and_no_thread(pair):
    here, there = pair
    here.socket = Counted(here.socket)
    here.send((0, 0, 0), torch.ones(4))  # and its layout
    read(there, (0, 0, 0))
    here.socket.calls.clear()
    for number in range(1, 9):
        here.send((0, number, 0), torch.ones(4))
        read(there, (0, number, 0))
    assert here.socket.calls == ["send"] * 8
    assert here._writer is None


class Counted:
    """A socket that notes its calls."""

    def __init__(self, end):
        self.end, self.calls = end, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.end, name)


def test_more_shapes_than_layouts_have_numbers(pair):
    """A number is used again; of a shape whose number another has got, the layout is sent again."""
    here, there = pair
    for size in [*range(1, LAYOUTS + 5), 1, 2]:
        here.send((0, size, 0), torch.ones(size))
        assert read(there, (0, size, 0)).shape == (size,)


@pytest.mark.parametrize("how", ["close", "shutdown", "reset"])
def test_a_connection_that_ends_is_reported_once_and_receives_end(how):
    lost = []
    with ExitStack() as stack:
        here, there = tcp(stack)
        transport = WorkerTransport(0, far=[1], post=lambda *_: None, lost=lambda *each: lost.append(each))
        stack.callback(transport.close)
        transport.add_far(1, here)
        if how == "shutdown":
            here.shutdown(socket.SHUT_RDWR)
        else:
            if how == "reset":
                there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            there.close()
        with within(5), pytest.raises(PeerLost):
            transport.receive((0, 0, 0), source=1)
        assert [peer for peer, _ in lost] == [1]
        assert "the connection to it broke" in lost[0][1]
        transport.send(1, (0, 0, 1), torch.ones(1))  # is dropped


@pytest.mark.parametrize("who", ["the sender", "the receiver"])
def test_a_connection_that_is_cut_without_a_word_is_noticed_by_both_ends(who):
    """The sender has bytes that nobody acknowledges; the receiver, which waits, has its system ask."""
    lost = []
    with ExitStack() as stack:
        first, second = tcp(stack, 1.0)
        for end in (first, second):
            let_nothing_in(end)
        transport = WorkerTransport(0, far=[1], post=lambda *_: None, lost=lambda *each: lost.append(each))
        stack.callback(transport.close)
        transport.add_far(1, first)
        transport.ready((0, 0, 0))
        if who == "the sender":
            transport.send(1, (0, 0, 1), torch.ones(1))
        with within(5), pytest.raises(PeerLost):
            transport.receive((0, 0, 0), source=1)
        assert lost == [(1, "the connection to it broke: [Errno 110] Connection timed out")]


def test_values_are_posted_only_where_there_is_no_connection():
    posted = []
    with ExitStack() as stack:
        ends = tcp(stack)
        here, there = (WorkerTransport(at, far=[1 - at, 2], post=lambda *each: posted.append(each)) for at in (0, 1))
        for transport, end in zip((here, there), ends):
            stack.callback(transport.close)
            transport.add_far(1 - transport.index, end)
        here.send(1, (0, 0, 0), torch.ones(4))
        here.send(1, (0, 1, 0), torch.ones(1 << 20))
        here.send(2, (0, 2, 0), torch.ones(4))
        with within(10):
            assert torch.equal(there.receive((0, 0, 0), source=0), torch.ones(4))
            assert torch.equal(there.receive((0, 1, 0), source=0), torch.ones(1 << 20))
        assert [(to, key) for to, key, _ in posted] == [(2, (0, 2, 0))]
        assert here.sent[1].values == 2 and here.sent[1].bytes == 16 + (4 << 20)


def test_a_connection_that_comes_after_the_end_is_closed():
    with ExitStack() as stack:
        here, there = tcp(stack)
        transport = WorkerTransport(0, far=[1], post=print)
        transport.close()
        transport.add_far(1, here)
        assert here.fileno() == -1 and there.recv(1) == b""
