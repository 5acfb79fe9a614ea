"""Values go from device to device past the host, and are those that go through it; whatever fails, they go through it."""

import faulthandler
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.base.errors import PeerLost
from pippy.drivers.wire.gpu import device_transport
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.gpu.device_transport import DeviceTransport
from pippy.drivers.wire.worker_transport import WorkerTransport, in_process
from tests.drivers.simulated_device import SimulatedDevice


@pytest.fixture(autouse=True)
def no_threads_are_left():
    """Some tests fork."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("pippy "):
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def devices():
    return [SimulatedDevice() for _ in range(2)]


def pair(devices):
    for device in devices:
        device.set_current()
    return [
        DeviceTransport(carrier, DeviceCopies(device), near=[1 - index])
        for index, (carrier, device) in enumerate(zip(in_process(2), devices))
    ]


@pytest.fixture
def two(devices):
    """Two transports of one thread."""
    transports = pair(devices)
    for each in transports:
        each.received.first_step = -10
    yield transports
    for each in transports:
        each.close()
    assert [device.faults for device in devices] == [[], []]


def value(number, elements=1000):
    return torch.full((elements,), float(number))


def command(two, step, elements=1000):
    """A command in which the first sends a value to the second."""
    here, there = two
    here.send(1, (step, 0, 0), value(step, elements))
    here.finish()
    there.clear_interrupt()
    assert torch.equal(there.receive((step, 0, 0), 0), value(step, elements))
    there.finish()


def commands(two, count=2):
    """So many; the first one ends with the answer to the offer."""
    for step in range(-count, 0):
        command(two, step)


@pytest.fixture
def linked(two, devices):
    commands(two)
    assert [each.ways() for each in two] == [{1: ""}, {}]
    assert [device.lent() for device in devices] == [0, 0], "the offer is not held"
    return two


def test_a_value_is_copied_twice_on_devices_and_nobody_waits(linked, devices):
    here, there = linked
    for each in devices:
        each.copied = each.host_waits = 0
    sent = {
        "a": torch.arange(6.0).reshape(2, 3).t().requires_grad_(),
        "n": 7,
        "b": [torch.ones(2, dtype=torch.bool), None, torch.ones(0, 3), torch.arange(4)[::2]],
    }
    with devices[0].forbidding_waits(), devices[1].forbidding_waits():
        here.send(1, (0, 0, 0), sent)
        sent["a"].detach().zero_()
        found = there.receive((0, 0, 0), 0)
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3).t()) and found["a"].stride() == (1, 3)
    assert found["a"].requires_grad and found["a"].is_leaf and found["n"] == 7 and found["b"][0].all()
    assert not found["b"][0].requires_grad and found["b"][1] is None
    assert found["b"][2].shape == (0, 3) and found["b"][3].tolist() == [0, 2]
    assert [each.copied for each in devices] == [4, 4], "one on each device for each tensor"
    assert [each.host_waits for each in devices] == [0, 0]
    assert here.sent[1].bytes == 2 * 4000 + 24 + 2 + 16, "counted as by the host"


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_values_of_any_size_and_order_are_whole(data):
    """What the sender changes afterwards does not arrive, also where its memory is used again."""
    devices = [SimulatedDevice() for _ in range(2)]
    two = here, there = pair(devices)
    on_their_way: dict[int, torch.Tensor] = {}
    for number, what in enumerate(data.draw(st.lists(st.integers(0, 20), max_size=60))):
        if what < 11:
            sent = value(number, 97 * what)
            here.send(1, (0, number, 0), sent)
            on_their_way[number] = sent.clone()
            sent.zero_()
        elif what < 18 and on_their_way:
            wanted = sorted(on_their_way)[what % len(on_their_way)]
            here.finish()  # what goes by the host is sent
            assert torch.equal(there.receive((0, wanted, 0), 0), on_their_way.pop(wanted))
        else:
            two[what % 2].finish()
    here.finish()
    for number, expected in on_their_way.items():
        assert torch.equal(there.receive((0, number, 0), 0), expected)
    there.finish()
    assert [device.lent() for device in devices] == [0, 0]
    for each in two:
        each.close()
    assert [device.faults for device in devices] == [[], []]


def with_late_receiver(two, monkeypatch, count=40):
    """The values that have arrived, when the receiver's device copies them after all were sent, if nothing hurries it."""
    here, there = two
    device, awaited = there.copies.accelerator, []
    monkeypatch.setattr(device.computing, "wait_event", awaited.append)
    found = []
    with here.copies.accelerator.forbidding_waits(), device.forbidding_waits():
        for number in range(count):
            here.send(1, (0, number, 0), value(number))
            found.append(there.receive((0, number, 0), 0))
    assert here.copies.accelerator.lent() == count, "nobody has let go of what is not copied yet"
    monkeypatch.undo()
    for event in awaited:
        device.computing.wait_event(event)
    return found


@pytest.mark.parametrize("late", [True, False])
def test_memory_is_used_again_when_the_receiver_has_its_copy(linked, devices, monkeypatch, late):
    """The receiver has only told its device to copy, and the sender's is as late, or early: no host waits."""
    devices[0].late = late
    found = with_late_receiver(linked, monkeypatch)
    linked[1].ready((0, 99, 0))
    linked[1].finish()
    assert devices[0].lent() == 0
    for number, each in enumerate(found):
        assert torch.equal(each, value(number))


def test_a_receive_lets_go_of_what_has_been_copied(linked, devices):
    here, there = linked
    for number in range(5):
        here.send(1, (0, number, 0), value(number))
        there.receive((0, number, 0), 0)
        assert devices[0].lent() == 1


def test_a_wait_that_is_left_out_is_wrong_numbers(linked, devices, monkeypatch):
    """Of the receiver for the value. Else these tests would see nothing."""
    monkeypatch.setattr(devices[1], "waiting", lambda *given: lambda: None)
    here, there = linked
    here.send(1, (0, 0, 0), value(1))
    assert not torch.equal(there.receive((0, 0, 0), 0), value(1))


def test_memory_that_is_let_go_of_too_early_is_wrong_numbers_and_a_fault(linked, devices, monkeypatch):
    """As if nobody asked whether the copy is done. Else these tests would see nothing."""
    here, there = linked
    device, awaited = devices[1], []
    monkeypatch.setattr(device.computing, "wait_event", awaited.append)
    here.send(1, (0, 0, 0), value(1))
    found = there.receive((0, 0, 0), 0)
    there.copies._opened.clear()
    monkeypatch.undo()
    device.computing.wait_event(*awaited)
    assert not torch.equal(found, value(1))
    assert device.faults == [
        "the host waits for a stream to let go of shared memory",
        "shared memory is used that is not there any more",
    ]
    device.faults.clear()


class Opaque(torch.Tensor):
    """Of a class of which torch alone knows what belongs to it."""


def test_what_is_not_plain_or_on_the_host_goes_by_the_host(linked, devices):
    here, there = linked
    pinned = here.copies.accelerator.pinned(torch.ones(2))
    sent = [
        pinned,
        [torch.ones(2), pinned],
        torch.eye(2).to_sparse(),
        [torch.ones(2), torch.ones(2).as_subclass(Opaque)],
    ]
    for number, each in enumerate(sent):
        here.send(1, (0, number, 0), each)
        assert devices[0].lent() == 0
    here.finish()
    assert torch.equal(there.receive((0, 2, 0), 0).to_dense(), torch.eye(2))
    assert torch.equal(there.receive((0, 1, 0), 0)[1], torch.ones(2))
    assert here.ways() == {1: ""}


@pytest.mark.parametrize("which", [0, 1])
def test_memory_that_cannot_be_shared_leaves_values_to_the_host_and_says_why(two, devices, which):
    devices[which].shares = False
    commands(two, count=4)
    assert two[0].ways() == {1: ["it shares no memory", "it opens no memory"][which]}
    assert [device.lent() for device in devices] == [0, 0]


def test_bytes_that_do_not_arrive_are_seen_before_values_go_there(two, devices, monkeypatch):
    """As where a switch between two GPUs spoils what goes through it."""
    inner = devices[1].open
    devices[0].late = False  # else it would put the bytes there after this has spoiled them

    def spoiled(shared):
        memory = inner(shared)
        memory[-1] ^= 1
        return memory

    monkeypatch.setattr(devices[1], "open", spoiled)
    commands(two, count=5)
    assert two[0].ways() == {1: "the receiver's device does not see what the sender's has written"}
    assert devices[0].lent() == 0


def test_an_answer_that_never_comes_leaves_values_to_the_host(two, devices, monkeypatch):
    monkeypatch.setattr(two[1], "_answer", lambda: None)
    commands(two, count=5)
    assert two[0].ways() == {} and devices[0].lent() == 1, "one offer is made"


@pytest.mark.parametrize("arrives", ["before", "afterwards"])
def test_values_of_a_step_that_was_given_up_are_let_go_of(linked, devices, arrives):
    here, there = linked
    for step in range(3):
        if arrives == "afterwards":
            there.discard_before(step + 1)
        here.send(1, (step, 0, 0), {"a": value(7)})
        assert devices[0].lent() == (arrives == "before")
        for each in linked:
            each.interrupt()
            each.clear_interrupt()
            each.discard_before(step + 1)
        assert devices[0].lent() == 0
    here.send(1, (9, 0, 0), value(5))
    assert torch.equal(there.receive((9, 0, 0), 0), value(5))


def test_a_worker_that_closes_lets_go_of_what_has_arrived(linked, devices):
    here, there = linked
    here.send(1, (0, 0, 0), value(1))
    there.close()
    assert devices[0].lent() == 0


def before(monkeypatch, where, name, act):
    """Let something happen before each call of a function."""
    inner = getattr(where, name)

    def called(*given):
        act()
        return inner(*given)

    monkeypatch.setattr(where, name, called)


@pytest.mark.parametrize("given_up", ["before it waits", "while it waits"])
def test_a_worker_whose_device_waits_for_one_that_is_gone_ends(linked, devices, monkeypatch, given_up):
    """The sender's device never writes the value. The receiver sleeps until its device is done."""
    here, there = linked
    ended, receiver = [], devices[1]
    monkeypatch.setattr(device_transport, "GRACE", 0.05)

    def end_process(peer):
        ended.append(peer)
        receiver.let_go_of = True

    monkeypatch.setattr(device_transport, "end_process", end_process)
    here.send(1, (0, 0, 0), value(1))
    devices[0].computing.waiting.clear()
    devices[0].writing.clear()
    where = (receiver, "open") if given_up == "before it waits" else (receiver.computing, "wait_event")
    before(monkeypatch, *where, there.interrupt)
    there.receive((0, 0, 0), 0)
    there.clear_interrupt()
    assert ended[0] == 0


def test_a_worker_whose_device_gets_on_does_not_end(linked, monkeypatch):
    """Slowly, and long after the step was given up."""
    _, there = linked
    looked, ended = threading.Semaphore(0), []
    monkeypatch.setattr(device_transport, "GRACE", 0.01)
    monkeypatch.setattr(device_transport, "end_process", ended.append)
    turn = iter(range(10))

    def awaited():
        looked.release()
        return None if next(turn, None) is None else (object(), 0)

    monkeypatch.setattr(there.copies, "awaited", awaited)
    there.interrupt()
    there.clear_interrupt()
    for _ in range(11):
        assert looked.acquire(timeout=10)
    assert ended == []


def test_words_of_a_process_that_is_gone_are_not_taken_for_those_of_the_next(two, devices):
    """An offer of it, and an answer."""
    here, there = two
    here.send(1, (-9, 0, 0), value(1))
    there.forget([0])
    there.finish()
    assert here.ways() == {}
    here.forget([1])
    commands(two)
    assert here.ways() == {1: ""}
    here.forget([1])
    assert here.ways() == {}


def end_of(socket_end, index):
    """A transport of a process of its own, whose device does everything at once."""
    faulthandler.dump_traceback_later(50, exit=True, file=sys.__stderr__)  # if it hangs
    device = SimulatedDevice(late=False)
    device.set_current()
    carrier = WorkerTransport(index, {1 - index: socket_end})
    return DeviceTransport(carrier, DeviceCopies(device), near=[1 - index])


def await_value(transport, key, source):
    while not transport.ready(key):
        transport.carrier.wait_any([(key, source)], 20)


def test_two_processes_and_one_that_is_killed():
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        mine.close()
        with suppress(BaseException):
            there = end_of(theirs, 1)
            for step in range(100):
                there.send(0, (step, 1, 0), 2 * there.receive((step, 0, 0), 0))
                there.finish()
        os._exit(1)
    try:
        theirs.close()
        here = end_of(mine, 0)
        faulthandler.cancel_dump_traceback_later()
        for step in range(5):
            here.send(1, (step, 0, 0), value(step))
            here.copies.wait()
            await_value(here, (step, 1, 0), 1)
            assert torch.equal(here.receive((step, 1, 0), 1), value(2 * step))
            here.finish()
        assert here.ways() == {1: ""}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    here.send(1, (5, 0, 0), value(5))
    with pytest.raises(PeerLost):
        here.receive((5, 1, 0), 1)
    here.forget([1])
    assert here.ways() == {} and here.copies.accelerator.faults == []
    here.close()


def test_a_process_that_waits_for_a_killed_one_ends_and_says_so(monkeypatch):
    """The sender is killed before its device has copied the value."""
    monkeypatch.setattr(device_transport, "GRACE", 0.05)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    sender = os.fork()
    if sender == 0:
        mine.close()
        with suppress(BaseException):
            here = end_of(theirs, 1)
            for step in range(3):
                here.send(0, (step, 0, 0), value(step))
                here.finish()
                here.carrier.receive((step, 1, 0), 0)
            here.copies.accelerator.late = True  # it starts to copy the next value, and does not get there
            here.send(0, (3, 0, 0), value(3))
            here.carrier.receive((3, 1, 0), 0)
        os._exit(1)
    waiting = os.fork()
    if waiting == 0:
        theirs.close()
        with suppress(BaseException), open(writing, "w") as stderr:
            monkeypatch.setattr(sys, "stderr", stderr)
            there = end_of(mine, 0)
            for step in range(4):
                await_value(there, (step, 0, 0), 1)
                if step == 3:
                    there.copies.accelerator.late = True  # its host goes on
                    computing = there.copies.accelerator.computing
                    before(monkeypatch, computing, "wait_event", lambda: os.kill(sender, signal.SIGKILL))
                    before(monkeypatch, computing, "wait_event", there.interrupt)
                there.receive((step, 0, 0), 1)
                there.finish()
                there.carrier.send(1, (step, 1, 0), None)
        os._exit(0)
    for end in (writing, mine.detach(), theirs.detach()):
        os.close(end)
    try:
        with open(reading) as said:
            assert "its GPU has waited for what worker 1 may never do" in said.read()
        assert os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]) == 1
    finally:
        os.kill(sender, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(sender, 0)[1]) == -signal.SIGKILL
