"""Values go from device to device past the host, and are those that go through it; whatever fails, they go through it."""

import pytest
import torch

from pippy.drivers.transport import device_blocks, device_links
from pippy.drivers.transport.device_copies import DeviceCopies
from pippy.drivers.transport.device_transport import DeviceTransport
from pippy.drivers.transport.in_process import in_process
from tests.drivers.simulated_device import SimulatedDevice

SMALL = 4 * device_blocks.TRIED


@pytest.fixture
def devices():
    return [SimulatedDevice() for _ in range(2)]


@pytest.fixture
def two(monkeypatch, devices):
    """Two transports of one thread, whose blocks hold a few values."""
    monkeypatch.setattr(device_links, "_SMALLEST", SMALL)
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
