"""Values go from device to device past the host, and are those that go through it; whatever fails, they go through it."""

import os
import signal
import socket
import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.base.errors import PeerLost
from pippy.drivers.wire.gpu import blocks, device_transport, links
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.gpu.cuda_driver import NotShared
from pippy.drivers.wire.gpu.device_transport import DeviceTransport
from pippy.drivers.wire.gpu.shared_words import SharedWords
from pippy.drivers.wire.in_process import in_process
from pippy.drivers.wire.received_values import Interrupted
from pippy.drivers.wire.shared_memory_transport import SharedMemoryTransport
from tests.drivers.simulated_device import SimulatedDevice, SimulatedWords

SMALL = 4 * blocks.TRIED


@pytest.fixture
def devices():
    return [SimulatedDevice() for _ in range(2)]


@pytest.fixture
def two(monkeypatch, devices):
    """Two transports of one thread, whose blocks hold a few values."""
    monkeypatch.setattr(links, "_SMALLEST", SMALL)
    for device in devices:
        device.set_current()
    transports = [
        DeviceTransport(carrier, DeviceCopies(device), near=[1 - index])
        for index, (carrier, device) in enumerate(zip(in_process(2), devices))
    ]
    yield transports
    for each in transports:
        each.close()
    assert [device.faults for device in devices] == [[], []]


def value(number, elements=1000):
    return torch.full((elements,), float(number))


def commands(two, count=2, elements=1000):
    """So many commands in which the first sends a value to the second; none is in a block before the third."""
    here, there = two
    for number in range(-count, 0):
        here.send(1, (number, 0, 0), value(number, elements))
        here.finish()
        there.clear_interrupt()
        assert torch.equal(there.receive((number, 0, 0), 0), value(number, elements))
        there.finish()


@pytest.fixture
def linked(two):
    for each in two:
        each.received.first_step = -10
    commands(two)
    return two


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


def sizes(links):
    return [block.size for blocks in links._outgoing.values() for block in blocks]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_values_of_any_size_and_order_are_whole(data):
    """Places are used again, some values find none, and what the sender changes afterwards does not arrive."""
    devices = [SimulatedDevice() for _ in range(2)]
    for device in devices:
        device.set_current()
    two = here, there = [
        DeviceTransport(carrier, DeviceCopies(device), near=[1 - index])
        for index, (carrier, device) in enumerate(zip(in_process(2), devices))
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(links, "_SMALLEST", SMALL)
        patched.setattr(links, "LIMIT", 4 * SMALL)
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
    assert sum(sizes(here.links)) <= 4 * SMALL
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
    assert sizes(linked[0].links) == [SMALL] and not linked[0].links._wanted, "it was enough"


@pytest.mark.parametrize("skipping", [0, 1])
def test_a_wait_that_is_left_out_is_wrong_numbers(linked, monkeypatch, skipping):
    """Of the sender for the place, or of the receiver for the value. Else these tests would see nothing."""
    device, inner = linked[skipping].copies.accelerator, SimulatedWords.wait
    linked[0].copies.accelerator.late = skipping == 1
    monkeypatch.setattr(SimulatedWords, "wait", lambda words, *given: words.device is device or inner(words, *given))
    found = with_late_receiver(linked, monkeypatch)
    assert any(not torch.equal(each, value(number)) for number, each in enumerate(found))


def test_a_block_that_is_full_sends_values_by_the_host_and_another_one_is_added(linked):
    here, there = linked
    for command in range(4):
        for number in range(8):
            here.send(1, (command, number, 0), value(number))
        here.finish()
        for number in range(8):
            assert torch.equal(there.receive((command, number, 0), 0), value(number))
        there.finish()
    assert sizes(here.links) == [SMALL, SMALL]


def test_a_value_larger_than_all_blocks_may_be_goes_by_the_host(linked, monkeypatch):
    here, there = linked
    monkeypatch.setattr(links, "LIMIT", 2 * SMALL)
    for command in range(3):
        here.send(1, (command, 0, 0), value(command, 2 * SMALL))
        here.finish()
        assert torch.equal(there.receive((command, 0, 0), 0), value(command, 2 * SMALL))
        there.finish()
    assert sizes(here.links) == [SMALL]


class Opaque(torch.Tensor):
    """Of a class of which torch alone knows what belongs to it."""


def test_what_is_not_plain_or_on_the_host_goes_by_the_host(linked):
    here, there = linked
    pinned = here.copies.accelerator.empty_pinned((2,), (1,), torch.float32).fill_(1)
    sparse = torch.eye(2).to_sparse()
    for number, sent in enumerate(
        [pinned, [torch.ones(2), pinned], 7, [torch.ones(2), torch.ones(2).as_subclass(Opaque)]]
    ):
        assert here.links.note(1, 0, sent) is None, number
    here.send(1, (0, 9, 0), sparse)
    assert torch.equal(there.receive((0, 9, 0), 0).to_dense(), torch.eye(2))


@pytest.mark.parametrize("which", [0, 1])
def test_a_device_that_cannot_leaves_values_to_the_host_and_says_why(two, devices, which):
    for each in two:
        each.received.first_step = -10
    devices[which].shares = False
    commands(two, count=5)
    assert two[0].links.ways() == {1: ["it shares no memory", "it maps no memory"][which]}
    assert sizes(two[0].links) == []


def test_bytes_that_do_not_arrive_are_seen_before_values_go_there(two, monkeypatch):
    """As where a switch between two GPUs spoils what goes through it."""
    for each in two:
        each.received.first_step = -10
    inner = two[1].copies.accelerator.open

    def spoiled(handle, size):
        block = inner(handle, size)
        block.memory[-1] ^= 1
        return block

    monkeypatch.setattr(two[1].copies.accelerator, "open", spoiled)
    commands(two, count=5)
    assert two[0].links.ways() == {1: "the receiver's device does not see what the sender's has written"}


@pytest.mark.parametrize("which", [0, 1])
def test_words_that_do_not_arrive_are_seen_before_values_go_there(two, monkeypatch, which):
    for each in two:
        each.received.first_step = -10
    inner = SimulatedWords.write
    device = two[which].copies.accelerator
    monkeypatch.setattr(SimulatedWords, "write", lambda words, *given: words.device is device or inner(words, *given))
    commands(two, count=5)
    said = "receiver's device" if which else "device"
    assert two[0].links.ways() == {1: f"the host does not see what the {said} writes to its memory"}
    assert sizes(two[0].links) == []


def test_an_answer_that_never_comes_leaves_values_to_the_host(two, monkeypatch):
    for each in two:
        each.received.first_step = -10
    monkeypatch.setattr(two[1].links, "settle", lambda: None)
    commands(two, count=5)
    assert two[0].links.ways() == {} and sizes(two[0].links) == [SMALL], "one is offered again and again"


def test_the_page_of_another_container_is_not_taken_for_the_senders():
    page, other = SharedWords.create(), SharedWords.create()
    with pytest.raises(NotShared, match="another container"):
        SharedWords.find(page.name._replace(token=other.name.token))
    with pytest.raises(NotShared, match="not to be seen"):
        SharedWords.find(page.name._replace(path="/proc/self/fd/99999"))
    page.close()
    other.close()


def test_blocks_are_given_back_when_nothing_needs_them(linked, devices):
    here, there = linked
    here.send(1, (0, 0, 0), value(1))
    here.trim()
    here.finish()
    there.finish()
    assert len(there.links._incoming) == 1, "a value is in it"
    assert torch.equal(there.receive((0, 0, 0), 0), value(1))
    for each in (there, here, there, here):
        each.finish()
    assert sizes(here.links) == [] and there.links._incoming == {}
    assert [device._blocks for device in devices] == [{}, {}]
    commands(linked, count=3)
    assert here.links.ways() == {1: ""}, "and made again"


def test_the_places_of_a_step_that_was_given_up_are_free_again(linked):
    here, there = linked
    for step in range(3):
        for number in range(3):
            here.send(1, (step, number, 0), value(number))
        for each in linked:
            each.interrupt()
            each.clear_interrupt()
            each.discard_before(step + 1)
    here.send(1, (9, 0, 0), value(5))
    assert torch.equal(there.receive((9, 0, 0), 0), value(5))
    assert sizes(here.links) == [SMALL] and not here.links._wanted


@pytest.mark.parametrize("given_up", ["while it waits", "before it waits"])
def test_a_device_whose_sender_has_failed_is_let_go_on_when_the_step_is_given_up(linked, monkeypatch, given_up):
    """The sender's device never writes that the value is there. The receiver sleeps until its device is done."""
    here, there = linked
    monkeypatch.setattr(device_transport, "GRACE", 0.05)
    sender, inner = here.copies.accelerator, SimulatedWords.write
    monkeypatch.setattr(SimulatedWords, "write", lambda words, *given: words.device is sender or inner(words, *given))
    here.send(1, (0, 0, 0), value(1))
    timer = threading.Timer(0.05 if given_up == "while it waits" else 0, there.interrupt)
    timer.start()
    with pytest.raises(Interrupted):
        there.receive((0, 0, 0), 0)
        there.finish()
    timer.join()
    there.clear_interrupt()
    monkeypatch.setattr(SimulatedWords, "write", inner)
    for each in linked:
        each.discard_before(1)
    here.send(1, (1, 0, 0), value(2))
    here.send(1, (1, 1, 0), value(3))
    assert torch.equal(there.receive((1, 1, 0), 0), value(3))
    assert torch.equal(there.receive((1, 0, 0), 0), value(2))


def test_what_was_shared_with_a_process_that_is_gone_is_freed(linked, devices):
    """A value for it is in the block, and one of its own never came."""
    here, there = linked
    here.send(1, (0, 0, 0), value(1))
    here.forget([1])
    there.forget([0])
    assert [device._blocks for device in devices] == [{}, {}]
    assert here.links.ways() == {}


def test_a_block_is_replaced_before_its_numbers_end(linked, monkeypatch):
    here, _ = linked
    monkeypatch.setattr(blocks, "LAST", 4)
    for step in range(1, 4):
        here.received.first_step = linked[1].received.first_step = -10
        commands(linked, count=step)
    numbers = [block.number for block in here.links._outgoing[1]]
    assert numbers and 0 not in numbers


def end_of(socket_end, index):
    """A transport of a process of its own, whose device does everything at once."""
    device = SimulatedDevice(late=False)
    device.set_current()
    carrier = SharedMemoryTransport(index, {1 - index: socket_end})
    return DeviceTransport(carrier, DeviceCopies(device), near=[1 - index])


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
        for step in range(5):
            here.send(1, (step, 0, 0), value(step))
            here.copies.wait()
            while not here.ready((step, 1, 0)):
                here.carrier.wait_any([((step, 1, 0), 1)], 20)
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
