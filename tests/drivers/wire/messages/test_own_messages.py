"""Messages to the worker of the controller's own process: neither side's later changes reach the other."""

import threading

import pytest
import torch

from pippy.drivers.wire.messages.controller_messages import OwnMessages
from pippy.drivers.wire.messages.worker_messages import DeliveryFailure, MessageQueue
from pippy.drivers.wire.pickling import Pickled, pickle_by_value, pickle_message, unpickle


@pytest.fixture
def queue():
    made = MessageQueue()
    yield made
    made.close()


def storages(value):
    return {each.untyped_storage().data_ptr() for each in value}


def test_tensors_are_copied_once_each_way_and_keep_what_they_are(queue, monkeypatch):
    own = OwnMessages(queue, str)
    given = [torch.randn(2, 3).t(), torch.randn(4, dtype=torch.bfloat16)[::2], torch.ones(2, requires_grad=True)]
    future = own.post(0, pickle_message({"tensors": given, "code": pickle_by_value(lambda: given[0])}))
    delivery = queue.get()
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
def test_what_is_around_the_call_in_the_script_does_not_reach_the_worker(queue, around):
    with around:
        OwnMessages(queue, str).post(0, pickle_message(torch.ones(2, device="cpu")))
    taken = queue.get().message
    assert not taken.is_inference() and taken.device.type == "cpu"
    (taken * torch.ones(2, requires_grad=True)).sum().backward()


def test_messages_are_taken_in_order_and_answered_from_another_thread(queue):
    own = OwnMessages(queue, str)
    futures = {number: own.post(number, pickle_message(number)) for number in (1, 0, 2)}

    def work():
        for _ in range(3):
            delivery = queue.get()
            delivery.reply(("answered", delivery.message))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert {number: unpickle(each.value())[1] for number, each in futures.items()} == {0: 0, 1: 1, 2: 2}


def test_one_that_cannot_be_unpickled_is_answered_so_and_those_behind_it_go_on(queue):
    own = OwnMessages(queue, answer=int)
    failed = own.post(0, Pickled(b"no pickle", []))
    assert isinstance(unpickle(failed.value()), DeliveryFailure)
    own.post(1, pickle_message("next"))
    assert queue.get().message == "next"
    assert "ValueError" in unpickle(own.urgent(pickle_message("x")).value()).text
