"""Values leave a device and arrive on another while both compute, and are whole."""

import select
import threading

import pytest
import torch

from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.gpu.device_transport import DeviceTransport
from pippy.drivers.wire.worker_transport import in_process
from pippy.ir.base.errors import StageError
from tests.drivers.simulated_device import DeviceFailed, SimulatedDevice


@pytest.fixture
def device():
    device = SimulatedDevice()
    device.set_current()
    yield device
    assert device.faults == []


@pytest.fixture
def copies(device):
    copies = DeviceCopies(device)
    yield copies
    copies.close()


@pytest.fixture
def two():
    devices = [SimulatedDevice(), SimulatedDevice()]
    for each in devices:
        each.set_current()
    transports = [DeviceTransport(carrier, DeviceCopies(own)) for carrier, own in zip(in_process(2), devices)]
    yield transports
    for each in transports:
        each.close()


def test_a_value_may_be_changed_and_freed_once_its_copy_has_begun(copies):
    tensor = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    copy = copies.to_host({"a": tensor, "b": [tensor.detach(), 7]})
    tensor.detach().zero_()
    del tensor
    found = copy.result()
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3).t()) and found["a"].stride() == (1, 3)
    assert found["a"].requires_grad and found["a"].is_leaf and found["b"][1] == 7
    assert not found["b"][0].requires_grad and torch.equal(found["b"][0], found["a"])


def test_what_is_read_before_it_is_copied_has_no_numbers(device, copies, monkeypatch):
    """Else these tests would see nothing."""
    made, inner = [], device.copy
    monkeypatch.setattr(device, "copy", lambda *given, **more: made.append(inner(*given, **more)) or made[-1])
    device.copies_may_end.clear()
    copy = copies.to_host(torch.ones(2))
    assert made[1].isnan().all()
    device.copies_may_end.set()
    assert torch.equal(copy.result(), torch.ones(2)) and torch.equal(made[1], torch.ones(2))


def test_memory_of_the_device_is_free_when_the_host_has_its_copy(device, copies):
    device.copies_may_end.clear()
    copy = copies.to_host([torch.ones(2), torch.ones(3)])
    assert len(device._here) == 2
    device.copies_may_end.set()
    copy.result()
    assert device._here == {}


def test_a_value_arrives_before_it_is_computed_with(device, copies):
    with device.forbidding_waits():
        value = copies.to_device({"x": torch.ones(3, requires_grad=True), "n": torch.arange(2), "c": None})
        again = copies.to_device(value)
    assert again["x"] is value["x"], "it is there already"
    assert torch.equal(value["x"], torch.ones(3)) and value["x"].requires_grad and value["x"].is_leaf
    assert torch.equal(value["n"], torch.arange(2)) and value["c"] is None


def test_a_device_that_fails_says_so_where_it_is_waited_for(device, copies):
    device.fails = True
    for wait in (copies.to_host(torch.ones(2)).result, copies.wait):
        with pytest.raises(DeviceFailed):
            wait()


def test_a_send_waits_for_nothing_and_the_value_is_sent_while_its_sender_waits(two):
    """Each waits for the other's value: it is sent from inside of the receive."""
    here, there = two
    found = []

    def other():
        there.copies.accelerator.set_current()
        with there.copies.accelerator.forbidding_waits():
            there.send(0, (0, 1, 0), torch.full((3,), 2.0))
            found.append(there.receive((0, 0, 0), 0))
        there.finish()  # the other value may have come first

    thread = threading.Thread(target=other)
    thread.start()
    with here.copies.accelerator.forbidding_waits():
        here.send(1, (0, 0, 0), torch.ones(3))
        assert torch.equal(here.receive((0, 1, 0), 1), torch.full((3,), 2.0))
    here.finish()
    thread.join(10)
    assert torch.equal(found[0], torch.ones(3))
    assert here.sent[1].values == 1 and here.sent[1].bytes == 12
    assert [each.copies.accelerator.faults for each in two] == [[], []]


def test_what_cannot_leave_the_device_ends_the_wait_of_its_sender(two):
    here, _ = two
    here.copies.accelerator.fails = True
    here.copies.accelerator.copies_may_end.clear()
    here.send(1, (0, 5, 2), torch.ones(3))
    here.copies.accelerator.copies_may_end.set()
    with pytest.raises(
        StageError, match="value 5 of micro-batch 2 of step 0 could not be sent to worker 1: DeviceFailed"
    ):
        here.receive((0, 0, 0), 1)
    with pytest.raises(DeviceFailed):
        here.finish()


def test_what_was_copied_meanwhile_is_sent_by_a_receive_that_need_not_wait(two):
    here, there = two
    leaves = here.copies.accelerator.copies_may_end
    leaves.clear()
    here.send(1, (0, 0, 0), torch.ones(1))
    leaves.set()
    assert select.select([here.received.wakeup], [], [], 10)[0]
    here.deliver((0, 1, 0), torch.ones(1))
    here.receive((0, 1, 0), 1)
    assert there.ready((0, 0, 0))


def test_values_of_a_step_that_was_given_up_are_not_sent(two):
    here, there = two
    here.copies.accelerator.copies_may_end.clear()
    here.send(1, (0, 0, 0), torch.ones(1))
    here.drop_unsent()
    here.send(1, (1, 0, 0), torch.ones(1))
    here.discard_before(2)
    here.copies.accelerator.copies_may_end.set()
    here.send(1, (2, 0, 0), torch.ones(1))
    here.finish()
    assert [there.ready((step, 0, 0)) for step in range(3)] == [False, False, True]


def test_the_thread_that_waits_for_copies_ends_with_the_transport(two):
    here, _ = two
    here.send(1, (0, 0, 0), torch.ones(1))
    (thread,) = here.copies._waits._threads
    here.close()
    thread.join(10)
    assert not thread.is_alive()
