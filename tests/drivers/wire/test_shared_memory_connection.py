"""The limits of shared memory: rings that wrap, grow and fill up, full sockets, processes that die, nothing left behind."""

import contextlib
import errno
import os
import signal
import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pippy.drivers.base.errors import PeerLost
from pippy.drivers.wire import packet, pickling
from pippy.drivers.wire.packet import LAYOUTS
from pippy.drivers.wire.ring import MINIMUM, Ring
from pippy.drivers.wire.shared_memory_connection import SharedMemoryConnection
from pippy.drivers.wire.worker_transport import WorkerTransport
from tests.drivers.processes import (
    assert_no_more_shared_files,
    few_descriptors,
    open_descriptors,
    shared_files,
    within,
)

MEGABYTE = 1 << 20


@contextlib.contextmanager
def two(limit=1 << 26):
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = WorkerTransport(0, {1: first}, limit), WorkerTransport(1, {0: second}, limit)
    try:
        yield pair
    finally:
        for transport in pair:
            transport.close()


def filled(number, size):
    """``size`` bytes that tell which value they belong to."""
    return torch.full((size // 4,), number, dtype=torch.int32)


def holds(tensor, number, size):
    return tensor.numel() == size // 4 and bool((tensor == number).all())


def receive_all(here, there, numbers, sizes):
    """Both ends in one thread: the sender gets a turn whenever nothing more has arrived."""
    for number, size in zip(numbers, sizes):
        while not there.ready((0, number, 0)):
            here.ready((0, -1, 0))
        assert holds(there.receive((0, number, 0), 0), number, size)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 6)), max_size=60))
def test_places_of_a_ring_never_overlap(actions):
    ring, used, freed = Ring(100), [], 0
    for size, frees in actions:
        start = ring.allocate(size)
        if start is None:
            assert used, "an empty ring has place for anything"
        else:
            assert start >= 0 and start + size <= 100
            assert all(start + size <= other or other + length <= start for other, length, _ in used)
            used.append((start, size, ring.head))
        for _ in range(min(frees, len(used))):
            freed = used.pop(0)[2]
            ring.free(freed)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 400, 5000, 70_000, 300_000, 700_000]), st.booleans()), min_size=1, max_size=60
    )
)
def test_any_mix_of_sizes_through_a_ring_that_cannot_grow(values):
    with two(limit=MINIMUM) as (here, there):
        waiting = []
        for number, (size, takes) in enumerate(values):
            here.send(1, (0, number, 0), filled(number, size))
            waiting.append((number, size))
            if takes:
                receive_all(here, there, *zip(*waiting))
                waiting.clear()
        if waiting:
            receive_all(here, there, *zip(*waiting))
        assert here.connections[1]._rings_made <= 1


def test_the_ring_wraps_many_times():
    with two(limit=MINIMUM) as (here, there):
        for number in range(200):
            here.send(1, (0, number, 0), filled(number, 100_000))
            assert holds(there.receive((0, number, 0), 0), number, 100_000)
        assert here.connections[1]._rings_made == 1 and here.connections[1]._ring.head > 10 * MINIMUM


def test_the_ring_grows_to_its_limit_and_no_further():
    with two(limit=4 * MEGABYTE) as (here, there):
        for number in range(30):
            here.send(1, (0, number, 0), filled(number, 512 * 1024))
        assert here.connections[1]._ring.size == 4 * MEGABYTE
        receive_all(here, there, range(30), [512 * 1024] * 30)


@pytest.mark.parametrize("size", [2048, 512 * 1024])
def test_the_sender_need_not_come_back_for_what_it_has_sent(size):
    """It may compute for seconds then, and the receiver would wait for a value that was sent long before."""
    with two(limit=MINIMUM) as (here, there):
        before = open_descriptors()
        for number in range(150):
            here.send(1, (0, number, 0), filled(number, size))
        for number in range(150):
            assert there.ready((0, number, 0)), number
            assert holds(there.receive((0, number, 0), 0), number, size)
        assert open_descriptors() <= before + 2  # each end has the ring


def shared_bytes(transport):
    """The shared memory that a transport has mapped."""
    memories = [memory for each in transport.connections.values() for memory in (each._in, each._out)]
    return sum(memory.size for memory in memories if memory is not None)


def send_at_once(transport, count, size):
    for number in range(count):
        transport.send(1, (0, number, 0), filled(number, size))
    return size


def test_rings_that_no_driver_needs_are_given_up():
    with two() as (here, there):
        receive_all(here, there, [7], [send_at_once(here, 8, MEGABYTE)])
        here.trim()
        assert shared_bytes(here) == 0
        there.ready((0, -1, 0))
        assert shared_bytes(there) == 0
        receive_all(here, there, [7], [send_at_once(here, 8, MEGABYTE)])


@pytest.mark.parametrize(("alone", "free"), [(False, 0), (False, 1), (True, 0)])
def test_a_receiver_without_a_free_descriptor_says_so_and_goes_on(alone, free):
    with two(limit=MINIMUM) as (here, there):
        if alone:
            here.send(1, (0, 0, 0), filled(0, MEGABYTE))
            assert there.ready((0, 0, 0))
            here.send(1, (0, 1, 0), filled(1, MEGABYTE - 4))
        here.send(1, (0, 2, 0), filled(2, MEGABYTE))
        with few_descriptors(free):
            while there.ready((0, -1, 0)):
                pass
        with pytest.raises(OSError, match=r"no free file descriptor.*ulimit -n") as caught:
            there.receive((0, 2, 0), 0)
        assert caught.value.errno == errno.EMFILE
        for number in range(3, 6):
            here.send(1, (1, number, 0), filled(number, MEGABYTE))
            assert holds(there.receive((1, number, 0), 0), number, MEGABYTE)


def test_one_value_may_be_larger_than_the_limit():
    with two(limit=MINIMUM) as (here, there):
        for number, size in enumerate([3 * MEGABYTE + 4, 100_000, 3 * MEGABYTE + 4]):
            here.send(1, (0, number, 0), filled(number, size))
        receive_all(here, there, range(3), [3 * MEGABYTE + 4, 100_000, 3 * MEGABYTE + 4])


def test_values_of_all_kinds_go_in_memory_of_their_own():
    complex_numbers = torch.randn(500, 3, dtype=torch.complex64)
    value = [
        torch.randn(300, 200).t(),
        torch.randn(300, 200)[::2, ::3],
        torch.randn(1000).bfloat16(),
        complex_numbers.conj(),
        complex_numbers.conj().imag,
        torch.zeros(0),
        torch.tensor(3, requires_grad=False),
        {"some": b"bytes" * 3000},
    ]
    with two(limit=MINIMUM) as (here, there):
        here.connections[1]._allocate = lambda *_: None  # as if the ring had no room
        here.send(1, (0, 0, 0), value)
        got = there.receive((0, 0, 0), 0)
        assert here.connections[1]._rings_made == 0 and not here.connections[1].queue
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got[:-1], value))
    assert got[-1] == value[-1] and got[0].stride() == value[0].stride()


@pytest.mark.parametrize("size", [4, 40_000])
def test_thousands_of_sends_without_a_receiver(size):
    with two(limit=2 * MEGABYTE) as (here, there):
        value = torch.empty(size // 4, dtype=torch.int32)
        for number in range(3000):
            here.send(1, (0, number, 0), value.fill_(number))
        assert here.connections[1].queue
        receive_all(here, there, range(3000), [size] * 3000)


def test_one_who_only_sends_learns_what_is_free():
    with two() as (here, there):
        for number in range(400):
            here.send(1, (0, number, 0), filled(number, 100_000))
            there.receive((0, number, 0), 0)
        assert here.connections[1]._ring.size == MINIMUM and not here.connections[1].queue


def test_answers_are_rare():
    with two() as (here, there):
        answers, answer = [], there.connections[0]._answer
        there.connections[0]._answer = lambda end: (answers.append(end), answer(end))
        for number in range(160):
            here.send(1, (0, number, 0), filled(number, 16 * 1024))
            there.receive((0, number, 0), 0)
        assert 5 <= len(answers) <= 10  # 2.5 MB in quarters of 1 MB


def test_forgotten_steps_leave_the_queue(monkeypatch):
    with two(limit=MINIMUM) as (here, there):
        monkeypatch.setattr(SharedMemoryConnection, "_send_alone", lambda *_: False)  # as without memory
        for step in range(3):
            for number in range(5):
                here.send(1, (step, number, 0), filled(number, 300_000 + 4 * step))
        here.discard_before(2)
        assert {record.key[0] for record in here.connections[1].queue if record.kind == packet.VALUE} == {2}
        there.discard_before(2)
        for number in range(5):
            while not there.ready((2, number, 0)):
                here.ready((9, 0, 0))
            assert holds(there.receive((2, number, 0), 0), number, 300_008)


def test_no_code_is_pickled_in_the_steady_state(monkeypatch):
    with two() as (here, there):
        for number in range(3):
            here.send(1, (0, number, 0), (torch.ones(5), {"a": torch.ones(2, 3).t(), "b": None}, number, True))
            there.receive((0, number, 0), 0)
            monkeypatch.setattr(pickling.cloudpickle, "dumps", None)


class Operations(TorchDispatchMode):
    """The names of the operations of torch that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def test_a_small_value_is_copied_twice_and_nothing_is_made_for_it_but_its_copy():
    value = torch.randn(2, 3).t().requires_grad_()
    with two() as (here, there):
        for number in range(2):
            with Operations() as seen:
                here.send(1, (0, number, 0), value)
                arrived = there.receive((0, number, 0), 0)
        assert torch.equal(arrived, value) and arrived.stride() == value.stride() and arrived.requires_grad
        assert arrived.is_leaf and not arrived._is_view()
    assert seen.names == ["detach", "copy_", "clone"]


def test_shapes_that_never_repeat_do_not_fill_the_memory():
    with two() as (here, there):
        for number in range(2 * LAYOUTS + 50):
            here.send(1, (0, number, 0), torch.empty(number % 1500))
            assert there.receive((0, number, 0), 0).numel() == number % 1500
        assert len(here.connections[1]._sent_layouts.by_signature) == LAYOUTS
        assert len(there.connections[0]._layouts._known) == LAYOUTS


def test_too_little_memory_is_an_error(monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    with two() as (here, there):
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match=r"there is no memory for 1,048,576 bytes of values"):
            here.send(1, (0, 0, 0), torch.ones(100_000))
        monkeypatch.undo()
        here.send(1, (0, 0, 0), torch.ones(100_000))
        assert there.receive((0, 0, 0), 0).sum() == 100_000


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_grows_and_nothing_is_left():
    before, shared = open_descriptors(), shared_files()
    with two() as (here, there):
        small, large = torch.ones(10), torch.ones(25_000)
        for number in range(10_000):
            if number == 1000:
                opened, used = open_descriptors(), resident()
            here.send(1, (number, 0, 0), large if number % 2 else small)
            there.receive((number, 0, 0), 0)
        assert open_descriptors() == opened and resident() - used < 4 * MEGABYTE
        assert_no_more_shared_files(shared)
    del here, there
    assert open_descriptors() == before


@contextlib.contextmanager
def forked(child, limit=1 << 26):
    """A transport whose peer is another process, which runs ``child`` with its own."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            first.close()
            child(WorkerTransport(1, {0: second}, limit))
            code = 0
        finally:
            os._exit(code)
    second.close()
    transport = WorkerTransport(0, {1: first}, limit)
    try:
        yield transport, pid
    finally:
        transport.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def echo(transport):
    number = 0
    while (value := transport.receive((0, number, 0), 0)) is not None:
        transport.send(0, (1, number, 0), value)
        number += 1
    transport.receive((2, 0, 0), 0)  # until then what is queued goes on


def test_two_processes():
    torch.manual_seed(0)
    sizes = torch.randint(0, 400_000, (300,)).tolist()
    with forked(echo, limit=4 * MEGABYTE) as (here, pid):
        for number, size in enumerate(sizes):  # all at once: far more than the rings hold
            here.send(1, (0, number, 0), filled(number, size))
        here.send(1, (0, len(sizes), 0), None)
        for number, size in enumerate(sizes):
            assert holds(here.receive((1, number, 0), 1), number, size // 4 * 4)
        here.send(1, (2, 0, 0), None)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_killed_peer_is_seen_at_once():
    def silent(transport):
        transport.send(0, (0, 0, 0), torch.ones(50_000))
        transport.receive((0, 1, 0), 0)

    with forked(silent) as (here, pid):
        assert here.receive((0, 0, 0), 1).sum() == 50_000
        here.send(1, (0, 9, 0), torch.ones(50_000))
        os.kill(pid, signal.SIGKILL)
        with within(1), pytest.raises(PeerLost, match="worker 1 is gone") as caught:
            here.receive((0, 5, 0), 1)
        assert caught.value.peer == 1
        for number in range(1000):  # dropped
            here.send(1, (0, number, 0), torch.ones(1000))
        assert not here.connections[1].queue
        reading, writing = os.pipe()
        os.write(writing, b"x")
        here.wait_for(reading)  # and not a spin on a dead socket, nor an error
        os.close(reading)
        os.close(writing)


def test_what_a_peer_sent_before_it_ended_arrives():
    def parting(transport):
        transport.receive((0, 0, 0), 0)
        for number in range(20):
            transport.send(0, (1, number, 0), filled(number, 100_000))

    with forked(parting) as (here, pid):
        here.send(1, (0, 0, 0), None)
        assert os.waitpid(pid, 0)[1] == 0
        for number in range(20):
            assert holds(here.receive((1, number, 0), 1), number, 100_000)
        with pytest.raises(PeerLost):
            here.receive((1, 20, 0), 1)


def test_an_end_that_left_things_unread_is_a_reset_and_loses_nothing():
    with two() as (here, there):
        for number in range(3):
            there.send(0, (1, number, 0), filled(number, 100_000))
            here.send(1, (0, number, 0), None)
        there.close()
        for number in range(3):
            assert holds(here.receive((1, number, 0), 1), number, 100_000)
        with pytest.raises(PeerLost):
            here.receive((1, 3, 0), 1)


def test_a_receive_that_sleeps_reads_its_value_and_does_not_look_for_another(monkeypatch):
    """Each look is a system call. The next receive, or the next sleep, takes in what came behind the value."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here, there = WorkerTransport(0, {1: first}), WorkerTransport(1, {0: second})
    here.send(1, (0, 0, 0), torch.ones(2))  # and its layout
    there.receive((0, 0, 0), source=0)
    looks, sleeps = [], []
    connection = there.connections[0]
    inner, sleep = connection.step, there._wait_for_traffic
    monkeypatch.setattr(connection, "step", lambda: looks.append(inner()) or looks[-1])

    def send_and_sleep(seconds):
        sleeps.append(seconds)
        here.send(1, (0, 1, 0), torch.ones(2))
        here.send(1, (0, 2, 0), torch.zeros(2))
        sleep(seconds)

    monkeypatch.setattr(there, "_wait_for_traffic", send_and_sleep)
    assert torch.equal(there.receive((0, 1, 0), source=0), torch.ones(2))
    assert looks == [False, True] and len(sleeps) == 1
    assert torch.equal(there.receive((0, 2, 0), source=0), torch.zeros(2))
    assert looks == [False, True, True] and len(sleeps) == 1
    here.close(), there.close()
