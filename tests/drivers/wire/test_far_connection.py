"""Values between two workers that share no memory: they arrive as they were, and the window is kept, whatever is read when."""

import os
import queue
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.base.errors import PeerLost
from pippy.drivers.wire.far_connection import FarConnection
from pippy.drivers.wire.known_layouts import LAYOUTS
from pippy.drivers.wire.messages.far_door import come_in, open_door
from pippy.drivers.wire.received_values import ReceivedValues
from pippy.drivers.wire.shared_memory_transport import SharedMemoryTransport
from tests.drivers.cut_connections import let_nothing_in
from tests.drivers.processes import listening, within

WINDOW = 1 << 16


@pytest.fixture
def pair():
    with ExitStack() as stack:
        made = connected(stack)
        yield made


def tcp(stack, seconds=5.0):
    """Two ends of a connection, made at a door."""
    taken = queue.SimpleQueue()
    invitation = open_door("127.0.0.1", lambda end, window: taken.put((end, window)), seconds, seconds)
    guest = come_in(invitation, seconds, seconds)
    host = taken.get(timeout=10)
    for end, _ in (guest, host):
        stack.callback(end.close)
    return guest, host


def connected(stack, window=WINDOW):
    (here, _), (there, _) = tcp(stack)
    received = [ReceivedValues(), ReceivedValues()]
    ends = [FarConnection(end, values, window) for end, values in zip((here, there), received)]
    for each in (*ends, *received):
        stack.callback(each.close)
    return ends


def same(value, other):
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other) and value.dtype == other.dtype and value.stride() == other.stride()
    if isinstance(value, (list, tuple)):
        return all(map(same, value, other))
    return value == other


def made(kind, size, number):
    tensor = torch.arange(size, dtype=torch.float64) + number
    return [
        tensor,
        (tensor.to(torch.bfloat16), None, tensor[:3].requires_grad_()),
        [tensor.view(1, -1).t(), "text", number],
        {"a": torch.tensor(number), "b": b"x" * size},
    ][kind]


def read(connection, key):
    """Read until a value is there."""
    with within(10):
        while not connection.receiver.has(key):
            connection.step() or os.sched_yield()
    return connection.receiver.take(key)


values = st.tuples(st.integers(0, 3), st.integers(1, 4_000))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["send", "back", "read"]), values), max_size=40))
def test_values_arrive_as_they_were_in_both_directions_whatever_is_read_when(actions):
    with ExitStack() as stack:
        ends = connected(stack, 1 << 15)
        under_way = [{}, {}]
        for number, (action, (kind, size)) in enumerate(actions):
            if action == "read":
                for end in ends:
                    end.step()
                continue
            frm = action == "back"
            value, key = made(kind, size, number), (0, number, 0)
            if ends[frm].send(key, value) is not None:
                under_way[not frm][key] = value
            for end in ends:
                assert end._sent - end._freed <= end.window
        for end, expected in zip(ends, under_way):
            for key, value in expected.items():
                got = read(end, key)
                assert same(value, got) if not isinstance(value, dict) else same([*value.values()], [*got.values()])


def test_a_value_without_room_is_left_to_the_other_way_until_the_receiver_has_read(pair):
    here, there = pair
    value = torch.ones(WINDOW // 32)
    sent = 0
    while here.send((0, sent, 0), value) is not None:
        sent += 1
    assert sent == (WINDOW - 1024) // (value.nbytes + 64)  # 1024 for the layout
    assert here.send((0, 99, 0), torch.ones(WINDOW)) is None
    for number in range(sent):
        assert torch.equal(read(there, (0, number, 0)), value)
    with within(10):
        while here.send((0, 100, 0), value) is None:
            here.step() or os.sched_yield()
    assert torch.equal(read(there, (0, 100, 0)), value)


def test_a_value_takes_one_call_to_send_and_one_to_read(pair):
    here, there = pair
    for end in pair:
        end.socket = Counted(end.socket)
    here.send((0, 0, 0), torch.ones(4))  # and its layout
    read(there, (0, 0, 0))
    for end in pair:
        end.socket.calls.clear()
    for number in range(1, 9):
        here.send((0, number, 0), torch.ones(4))
        read(there, (0, number, 0))
    assert here.socket.calls == ["send"] * 8
    assert set(there.socket.calls) == {"recv_into"}
    for number in range(9, 17):
        here.send((0, number, 0), torch.ones(4))
    there.socket.calls.clear()
    read(there, (0, 16, 0))
    assert len(there.socket.calls) <= 8, "what came together is read together"


class Counted:
    """A socket that notes its calls."""

    def __init__(self, end):
        self.end, self.calls = end, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.end, name)


def test_values_of_steps_that_were_given_up_are_dropped_and_make_room(pair):
    here, there = pair
    while here.send((0, 0, 0), torch.ones(100)) is not None:
        pass
    there.receiver.discard_before(1)
    with within(10):
        while here.send((1, 0, 0), torch.zeros(100)) is None:
            there.step()
            here.step() or os.sched_yield()
    assert torch.equal(read(there, (1, 0, 0)), torch.zeros(100))
    assert not there.receiver.values


def test_more_shapes_than_layouts_have_numbers(pair):
    """A number is used again; of a shape whose number another has got, the layout is sent again."""
    here, there = pair
    for size in [*range(1, LAYOUTS + 5), 1, 2]:
        assert here.send((0, size, 0), torch.ones(size)) is not None
        assert read(there, (0, size, 0)).shape == (size,)
        here.step()


@pytest.mark.parametrize("how", ["close", "shutdown", "reset"])
def test_a_connection_that_ends_is_reported_once_and_receives_end(how):
    lost = []
    with ExitStack() as stack:
        (here, window), (there, _) = tcp(stack)
        transport = SharedMemoryTransport(0, {}, far=[1], post=lambda *_: None, lost=lambda *each: lost.append(each))
        stack.callback(transport.close)
        transport.add_far(1, here, window)
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
        (first, window), (second, _) = tcp(stack, 1.0)
        for end in (first, second):
            let_nothing_in(end)
        transport = SharedMemoryTransport(0, {}, far=[1], post=lambda *_: None, lost=lambda *each: lost.append(each))
        stack.callback(transport.close)
        transport.add_far(1, first, window)
        transport.ready((0, 0, 0))
        if who == "the sender":
            transport.send(1, (0, 0, 1), torch.ones(1))
        with within(5), pytest.raises(PeerLost):
            transport.receive((0, 0, 0), source=1)
        assert lost == [(1, "the connection to it broke: [Errno 110] Connection timed out")]


def test_large_values_are_posted_and_small_ones_use_the_connection():
    posted = []
    with ExitStack() as stack:
        (first, window), (second, _) = tcp(stack)
        here, there = (
            SharedMemoryTransport(at, {}, far=[1 - at], post=lambda *each: posted.append(each)) for at in (0, 1)
        )
        for transport, end in ((here, first), (there, second)):
            stack.callback(transport.close)
            transport.add_far(1 - transport.index, end, window)
            transport.ready((9, 9, 9))  # takes it in
        here.send(1, (0, 0, 0), torch.ones(4))
        here.send(1, (0, 1, 0), torch.ones(window))
        with within(10):
            assert torch.equal(there.receive((0, 0, 0), source=0), torch.ones(4))
        assert [(to, key) for to, key, _ in posted] == [(1, (0, 1, 0))]
        assert here.sent[1].values == 2 and here.sent[1].bytes == 16 + 4 * window


def test_a_connection_that_comes_after_the_end_is_closed():
    with ExitStack() as stack:
        (here, window), (there, _) = tcp(stack)
        transport = SharedMemoryTransport(0, {}, far=[1], post=print)
        transport.close()
        transport.add_far(1, here, window)
        assert here.fileno() == -1 and there.recv(1) == b""


def test_a_stranger_is_told_nothing_and_the_invited_still_comes_in():
    taken, before = queue.SimpleQueue(), listening([os.getpid()])
    invitation = open_door("127.0.0.1", lambda *each: taken.put(each), 10.0, 5.0)
    with ExitStack() as stack:
        for said in (bytes(36), invitation.second + bytes(4), b""):
            stranger = stack.enter_context(socket.create_connection((invitation.address, invitation.port)))
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            assert stranger.recv(100) == b""
        guest, _ = come_in(invitation, 10.0, 5.0)
        stack.callback(guest.close)
        host, _ = taken.get(timeout=10)
        stack.callback(host.close)
        assert listening([os.getpid()]) == before
        with pytest.raises(OSError):
            come_in(invitation, 1.0, 5.0)
    assert "secret" not in repr(invitation) and repr(invitation.first) not in repr(invitation)


def test_a_guest_that_gives_up_leaves_the_host_without_a_connection():
    """The host had one, which was closed: it took its peer for lost."""
    taken, before = queue.SimpleQueue(), threading.active_count()
    invitation = open_door("127.0.0.1", lambda *each: taken.put(each), 1.0, 5.0)
    with socket.create_connection((invitation.address, invitation.port)) as guest:
        guest.sendall(invitation.first + struct.pack("<I", WINDOW))
        assert guest.recv(32) == invitation.second
    with within(10):
        while threading.active_count() > before:
            os.sched_yield()
    assert taken.empty()


def test_strangers_at_a_door_take_one_descriptor_at_a_time_and_the_invited_still_comes_in():
    """One says nothing, one half a secret, one much, and then a thousand come and go, or stay outside."""
    taken, before = queue.SimpleQueue(), len(os.listdir("/proc/self/fd"))
    invitation = open_door("127.0.0.1", lambda *each: taken.put(each), 30.0, 5.0)
    place = invitation.address, invitation.port
    with ExitStack() as stack:
        for said in (b"", os.urandom(20), os.urandom(1 << 20)):
            stranger = stack.enter_context(socket.create_connection(place))
            stranger.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):
                stranger.send(said or b"x")
        for _ in range(1000):
            with socket.socket() as stranger:
                stranger.setblocking(False)
                stranger.connect_ex(place)
        assert len(os.listdir("/proc/self/fd")) <= before + 3 + 1 + 1, "the strangers, the door, and who stands in it"
        guest, _ = come_in(invitation, 20.0, 5.0)
        stack.callback(guest.close)
        host, _ = taken.get(timeout=10)
        host.close()
    with within(5):
        while len(os.listdir("/proc/self/fd")) > before:
            os.sched_yield()


def test_a_door_that_nobody_comes_to_closes():
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    invitation = open_door("127.0.0.1", print, 0.05, 5.0)
    end = time.monotonic() + 30
    while set(threading.enumerate()) - threads or set(os.listdir("/proc/self/fd")) - files:
        assert time.monotonic() < end
        time.sleep(0.001)
    with pytest.raises(OSError):
        come_in(invitation, 1.0, 5.0)


def test_a_guest_that_finds_another_program_at_the_port_goes_away():
    with socket.create_server(("127.0.0.1", 0)) as other:
        invitation = open_door("127.0.0.1", print, 0.01, 5.0)
        wrong = type(invitation)("127.0.0.1", other.getsockname()[1], invitation.first, invitation.second)

        def answer():
            with other.accept()[0] as end:
                end.recv(100)
                end.sendall(bytes(36))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="another program answers"):
            come_in(wrong, 5.0, 5.0)
        thread.join()
