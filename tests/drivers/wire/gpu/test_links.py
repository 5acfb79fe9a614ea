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
from pippy.drivers.wire.gpu import device_transport, links
from pippy.drivers.wire.gpu.accelerator import NotShared
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.gpu.device_transport import DeviceTransport
from pippy.drivers.wire.gpu.places import Place
from pippy.drivers.wire.in_process import in_process
from pippy.drivers.wire.worker_transport import WorkerTransport
from tests.drivers.simulated_device import SharedEvent, SimulatedDevice

SIZE = 4032  # bytes of a value of 1000 numbers, aligned


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
def two(monkeypatch, devices):
    """Two transports of one thread, which begin with one place."""
    monkeypatch.setattr(links, "_FIRST", 1)
    transports = pair(devices)
    for each in transports:
        each.received.first_step = -10
    yield transports
    for each in transports:
        each.close()
    assert [device.faults for device in devices] == [[], []]


def value(number, elements=1000):
    return torch.full((elements,), float(number))


def command(two, step, elements=1000, values=1):
    """A command in which the first sends values to the second."""
    here, there = two
    for number in range(values):
        here.send(1, (step, number, 0), value(number + step, elements))
    here.finish()
    there.clear_interrupt()
    for number in range(values):
        assert torch.equal(there.receive((step, number, 0), 0), value(number + step, elements))
    there.finish()


def commands(two, count=2):
    """So many; the second one ends with the answer to the first place."""
    for step in range(-count, 0):
        command(two, step)
    two[0].finish()


@pytest.fixture
def linked(two):
    commands(two)
    return two


def sizes(transport):
    return [place.memory.nbytes for place in transport.links._outgoing.values()]


def test_a_value_is_copied_twice_on_devices_and_nobody_waits(linked, devices):
    here, there = linked
    for each in devices:
        each.copied = each.host_waits = 0
    sent = {
        "a": torch.arange(6.0).reshape(2, 3).t().requires_grad_(),
        "n": 7,
        "b": [torch.ones(2, dtype=torch.bool), None],
    }
    with devices[0].forbidding_waits(), devices[1].forbidding_waits():
        here.send(1, (0, 0, 0), sent)
        sent["a"].detach().zero_()
        found = there.receive((0, 0, 0), 0)
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3).t()) and found["a"].stride() == (1, 3)
    assert found["a"].requires_grad and found["a"].is_leaf and found["n"] == 7 and found["b"][0].all()
    assert not found["b"][0].requires_grad and found["b"][1] is None
    assert [each.copied for each in devices] == [2, 2], "one on each device for each tensor"
    assert [each.host_waits for each in devices] == [0, 0]
    assert [each.ways() for each in (here.links, there.links)] == [{1: ""}, {}]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_values_of_any_size_and_order_are_whole(data):
    """Places are used again, some values find none, and what the sender changes afterwards does not arrive."""
    devices = [SimulatedDevice() for _ in range(2)]
    two = here, there = pair(devices)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(links, "LIMIT", 5 * SIZE)
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
    assert sum(sizes(here)) <= 5 * SIZE
    for each in two:
        each.close()
    assert [device.faults for device in devices] == [[], []]


def with_late_receiver(two, monkeypatch, count=40):
    """The values that have arrived, when the receiver's device copies them after all were sent, if nothing hurries it."""
    here, there = two
    found, inner = [], there.copies.has_arrived
    monkeypatch.setattr(there.copies, "has_arrived", found.extend)
    with here.copies.accelerator.forbidding_waits(), there.copies.accelerator.forbidding_waits():
        for number in range(count):
            here.send(1, (0, number, 0), value(number))
            there.receive((0, number, 0), 0)
    inner(found)
    return found


@pytest.mark.parametrize("late", [True, False])
def test_a_place_is_used_again_behind_the_copy_out_of_it(linked, monkeypatch, late):
    """The receiver has only told its device to copy, and the sender's is as late, or early: no host waits."""
    linked[0].copies.accelerator.late = late
    found = with_late_receiver(linked, monkeypatch)
    assert len(found) == 40
    for number, each in enumerate(found):
        assert torch.equal(each, value(number))
    assert sizes(linked[0]) == [SIZE] and not linked[0].links._wanted, "it was enough"


@pytest.mark.parametrize("skipping", [0, 1])
def test_a_wait_that_is_left_out_is_wrong_numbers(linked, monkeypatch, skipping):
    """Of the sender for the place, or of the receiver for the value. Else these tests would see nothing."""
    device, inner = linked[skipping].copies.accelerator, SharedEvent.reaching
    linked[0].copies.accelerator.late = skipping == 1
    monkeypatch.setattr(
        SharedEvent, "reaching", lambda event: (lambda: None) if event.device is device else inner(event)
    )
    found = with_late_receiver(linked, monkeypatch)
    assert any(not torch.equal(each, value(number)) for number, each in enumerate(found))


def test_a_value_that_finds_no_place_goes_by_the_host_and_places_are_added(two, monkeypatch):
    """Four at first, also where one value has come; then one for each that found none, and no more than there are."""
    here, _ = two
    monkeypatch.setattr(links, "_FIRST", 4)
    commands(two)
    assert sizes(here) == 4 * [SIZE]
    found = []
    for step in range(8):
        command(two, step, values=12)
        found.append(len(sizes(here)))
    here.finish()
    assert found == [8, 8, 12, 12, 12, 12, 12, 12] and set(sizes(here)) == {SIZE}
    here.copies.accelerator.copied = 0
    command(two, 8, values=12)
    assert here.copies.accelerator.copied == 12, "none went by the host"


def test_a_value_larger_than_all_places_may_be_goes_by_the_host(linked, monkeypatch):
    monkeypatch.setattr(links, "LIMIT", 2 * SIZE)
    for step in range(3):
        command(linked, step, elements=2000)
    assert sizes(linked[0]) == [SIZE]


def test_a_small_value_leaves_the_large_place_to_a_large_one(linked):
    here, there = linked
    for step in range(3):
        command(linked, step, elements=2000)
    here.finish()
    here.send(1, (3, 0, 0), value(0))
    here.send(1, (3, 1, 0), value(1, 2000))
    assert [torch.equal(there.receive((3, at, 0), 0), value(at, 1000 * (1 + at))) for at in (0, 1)] == [True] * 2
    assert sizes(here) == [SIZE, 8000] and not here.links._wanted


class Opaque(torch.Tensor):
    """Of a class of which torch alone knows what belongs to it."""


def test_what_is_not_plain_or_on_the_host_goes_by_the_host(linked):
    here, there = linked
    pinned = here.copies.accelerator.empty_pinned((2,), (1,), torch.float32).fill_(1)
    sparse = torch.eye(2).to_sparse()
    sent = [pinned, [torch.ones(2), pinned], 7, [torch.ones(2), torch.ones(2).as_subclass(Opaque)]]
    here.copies.accelerator.copied = 0
    for number, each in enumerate(sent):
        assert here.links.note(1, 0, each, device_transport.layout_of(each)) is None, number
    here.send(1, (0, 9, 0), sparse)
    assert torch.equal(there.receive((0, 9, 0), 0).to_dense(), torch.eye(2))


@pytest.mark.parametrize("which", [0, 1])
def test_a_device_that_cannot_leaves_values_to_the_host_and_says_why(two, devices, which):
    devices[which].shares = False
    commands(two, count=5)
    assert two[0].links.ways() == {1: ["it shares no memory", "it opens no memory"][which]}
    assert sizes(two[0]) == [] and [device._blocks for device in devices] == [{}, {}]


@pytest.mark.parametrize("which", [0, 1])
def test_an_event_that_cannot_be_opened_leaves_values_to_the_host_and_says_why(two, devices, monkeypatch, which):
    def open_event(handle):
        raise NotShared("it opens no event")

    monkeypatch.setattr(devices[which], "open_event", open_event)
    commands(two, count=5)
    two[0].finish()
    assert two[0].links.ways() == {1: "it opens no event"}
    assert sizes(two[0]) == [] and [device._blocks for device in devices] == [{}, {}]


def test_bytes_that_do_not_arrive_are_seen_before_values_go_there(two, monkeypatch):
    """As where a switch between two GPUs spoils what goes through it."""
    inner = two[1].copies.accelerator.open
    two[0].copies.accelerator.late = False  # else it would put the bytes there after this has spoiled them

    def spoiled(handle):
        memory = inner(handle)
        memory[-1] ^= 1
        return memory

    monkeypatch.setattr(two[1].copies.accelerator, "open", spoiled)
    commands(two, count=5)
    assert two[0].links.ways() == {1: "the receiver's device does not see what the sender's has written"}
    assert sizes(two[0]) == []


def test_an_answer_that_never_comes_leaves_values_to_the_host(two, monkeypatch):
    monkeypatch.setattr(two[1].links, "settle", lambda: None)
    commands(two, count=5)
    assert two[0].links.ways() == {} and sizes(two[0]) == [SIZE], "no second one is made meanwhile"


def test_places_are_given_back_when_nothing_needs_them(linked, devices):
    here, there = linked
    here.send(1, (0, 0, 0), value(1))
    here.trim()
    here.finish()
    there.finish()
    assert len(there.links._incoming) == 1, "a value is in it"
    assert torch.equal(there.receive((0, 0, 0), 0), value(1))
    here.finish()
    assert sizes(here) == [SIZE], "the receiver still has it open"
    there.finish()
    assert there.links._incoming == {} and sizes(here) == [SIZE]
    here.finish()
    assert sizes(here) == [] and [device._blocks for device in devices] == [{}, {}]
    commands(linked, count=3)
    assert here.links.ways() == {1: ""}, "and made again"


def test_the_places_of_a_step_that_was_given_up_are_free_again(linked):
    here, there = linked
    for step in range(3):
        here.send(1, (step, 0, 0), value(7))
        for each in linked:
            each.interrupt()
            each.clear_interrupt()
            each.discard_before(step + 1)
    here.send(1, (9, 0, 0), value(5))
    assert torch.equal(there.receive((9, 0, 0), 0), value(5))
    assert sizes(here) == [SIZE] and not here.links._wanted


def test_word_that_a_value_was_taken_frees_no_place_of_a_later_one(linked):
    """The sender has cleaned up after a step that was given up, and uses the place again; the receiver has not."""
    here, there = linked
    here.send(1, (0, 0, 0), value(1))
    here.discard_before(1)
    here.send(1, (1, 0, 0), value(2))
    there.receive((0, 0, 0), 0)  # whatever it is
    here.send(1, (1, 1, 0), value(3))
    there.discard_before(1)
    here.finish()
    assert torch.equal(there.receive((1, 0, 0), 0), value(2)) and torch.equal(there.receive((1, 1, 0), 0), value(3))


def before(monkeypatch, where, name, act):
    """Let something happen before each call of a function."""
    inner = getattr(where, name)

    def called(*given):
        act()
        return inner(*given)

    monkeypatch.setattr(where, name, called)


@pytest.mark.parametrize("given_up", ["before it waits", "while it waits"])
def test_a_worker_whose_device_waits_for_one_that_is_gone_ends(linked, monkeypatch, given_up):
    """The sender's device never reaches its event. The receiver sleeps until its device is done."""
    here, there = linked
    ended, receiver = [], there.copies.accelerator
    monkeypatch.setattr(device_transport, "GRACE", 0.05)

    def end_process(peers):
        ended.append(peers)
        receiver.let_go = True

    monkeypatch.setattr(device_transport, "end_process", end_process)
    here.send(1, (0, 0, 0), value(1))
    here.copies.accelerator.computing.waiting.clear()
    receiver.recording.clear()
    where = (Place, "take") if given_up == "before it waits" else (there.copies, "has_arrived")
    before(monkeypatch, *where, there.interrupt)
    there.receive((0, 0, 0), 0)
    there.clear_interrupt()
    assert ended[0] == [0]


def test_a_worker_whose_device_gets_on_does_not_end(linked, monkeypatch):
    """Slowly, and long after the step was given up."""
    here, there = linked
    looked, ended = threading.Semaphore(0), []
    monkeypatch.setattr(device_transport, "GRACE", 0.01)
    monkeypatch.setattr(device_transport, "end_process", ended.append)
    inner, turn = there.links.held, iter(range(10))

    def held():
        looked.release()
        at = next(turn, None)
        return frozenset() if at is None else inner() | {(0, 0, at)}

    monkeypatch.setattr(there.links, "held", held)
    there.interrupt()
    there.clear_interrupt()
    for _ in range(11):
        assert looked.acquire(timeout=10)
    assert ended == []


def test_what_was_shared_with_a_process_that_is_gone_is_freed(linked, devices):
    """A value for it is in the place, and one of its own never came."""
    here, there = linked
    here.send(1, (0, 0, 0), value(1))
    here.forget([1])
    there.forget([0])
    assert [device._blocks for device in devices] == [{}, {}]
    assert here.links.ways() == {}


def test_words_of_a_process_that_is_gone_are_not_taken_for_those_of_the_next(two, devices):
    here, there = two
    command(two, -2)
    there.received.first_step = 0
    there.forget([0])
    there.finish()
    assert there.links._incoming == {} and here.links._outgoing
    here.forget([1])
    two[0].received.first_step = two[1].received.first_step = -10
    commands(two)
    assert here.links.ways() == {1: ""}


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
        assert here.links.ways() == {1: ""} and here.links._incoming
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    here.send(1, (5, 0, 0), value(5))
    with pytest.raises(PeerLost):
        here.receive((5, 1, 0), 1)
    here.forget([1])
    assert here.copies.accelerator._blocks == {} and here.copies.accelerator.faults == []
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
                    before(monkeypatch, there.copies, "has_arrived", lambda: os.kill(sender, signal.SIGKILL))
                    before(monkeypatch, there.copies, "has_arrived", there.interrupt)
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
