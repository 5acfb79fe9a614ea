"""The controller's messages to the worker of its own process, as rank 0 of torchrun has one: nothing is sent."""

from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from pippy.drivers.wire.messages.message_queue import MessageQueue
from pippy.drivers.wire.messages.urgent import answer_at_once
from pippy.drivers.wire.pickling import Pickled
from pippy.drivers.wire.value_layout import copied


class OwnMessages:
    """Puts messages into the ``queue`` of a worker of this process, and has ``answer`` answer urgent ones.

    Each tensor is copied once, as the script may change what it gave and the worker what it answered with.

    >>> from pippy.drivers.wire.pickling import pickle_message, unpickle
    >>> own, ones = OwnMessages(queue := MessageQueue(), answer=str), torch.ones(2)
    >>> answer = own.post(0, pickle_message(ones))
    >>> delivery = queue.get()
    >>> delivery.reply(delivery.message.mul_(2))
    >>> ones, unpickle(answer.value()), unpickle(own.urgent(pickle_message(3)).value())
    (tensor([1., 1.]), tensor([2., 2.]), '3')
    >>> queue.close()
    """

    def __init__(self, queue: MessageQueue, answer: Callable[[Any], Any]) -> None:
        self.queue, self.answer = queue, answer

    def post(self, number: int, pickled: Pickled) -> "Future[Pickled]":
        """Put a message into the queue; the future has its answer."""
        future: Future[Pickled] = Future()
        self.queue.put_pickled(number, _own(pickled), lambda answer: future.set_result(_own(answer)))
        return future

    def urgent(self, pickled: Pickled) -> "Future[Pickled]":
        """Have a message answered now; the future has the answer."""
        future: Future[Pickled] = Future()
        future.set_result(_own(answer_at_once(self.answer, _own(pickled))))
        return future


def _own(pickled: Pickled) -> Pickled:
    """A copy that shares no memory. The worker can train with its tensors, even if the script is in inference mode."""
    with torch.inference_mode(False):
        return Pickled(pickled.data, copied(pickled.tensors))
