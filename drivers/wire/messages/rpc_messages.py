"""The controller's messages to workers by RPC: to those of other hosts, and to those that pass values by RPC."""

import select
from collections.abc import Sequence

import torch

from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.pickling import Pickled
from pippy.drivers.wire.pollable_event import PollableEvent


class RpcMessages:
    """Messages to the workers that have these names for RPC. Threads of RPC take in the answers.

    >>> RpcMessages(["worker0", "worker1"]).names
    ('worker0', 'worker1')
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def post(self, worker: int, number: int, pickled: Pickled) -> "torch.futures.Future[Pickled]":
        """Put a message into a worker's queue; the future has its answer."""
        return rpc.post(self.names[worker], number, pickled)

    def urgent(self, worker: int, pickled: Pickled) -> "torch.futures.Future[Pickled]":
        """Send a message that is answered even while the worker computes."""
        return rpc.urgent(self.names[worker], pickled)

    def connect(self, one: int, other: int) -> int | None:
        """Nothing: workers that pass values by RPC find one another."""
        return None

    def wait(self, wakeup: PollableEvent, timeout: float) -> None:
        """Sleep until the event is set, or the time is up."""
        if select.select([wakeup], [], [], timeout)[0]:
            wakeup.clear()
