"""The controller's messages: to workers of its process, to others of its host over connections, elsewhere by RPC."""

from collections.abc import Collection, Mapping, Sequence

import torch

from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.controller_connections import ControllerConnections
from pippy.drivers.wire.messages.own_messages import OwnMessages
from pippy.drivers.wire.pickling import Pickled
from pippy.drivers.wire.pollable_event import PollableEvent


class ControllerMessages:
    """Messages to the workers ``near`` over ``connections``, and to the others by their ``names`` for RPC.

    ``first`` gives, for workers of other hosts that have neighbours there, the worker that can connect those. With ``far``
    the workers of different hosts are connected, too. ``own`` has the workers of this process.

    >>> messages = ControllerMessages(["a", "b", "c", "d"], near=[0], first={1: 1, 2: 1, 3: 3})
    >>> messages.connect(1, 2), messages.connect(0, 1), messages.connect(2, 3)
    (1, None, None)
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        near: Collection[int] = (),
        connections: ControllerConnections | None = None,
        first: Mapping[int, int] = {},
        far: bool = False,
        own: Mapping[int, OwnMessages] = {},
    ) -> None:
        self.names, self.near, self.connections = names, frozenset(near), connections or ControllerConnections()
        self.first, self.far, self.own = dict(first), far, own

    def post(self, worker: int, number: int, pickled: Pickled) -> "torch.futures.Future[Pickled]":
        """Put a message into a worker's queue; the future has its answer."""
        if worker in self.own:
            return self.own[worker].post(number, pickled)
        if worker in self.near:
            return self.connections.post(worker, number, pickled)
        return rpc.post(self.names[worker], number, pickled)

    def urgent(self, worker: int, pickled: Pickled) -> "torch.futures.Future[Pickled]":
        """Send a message that is answered even while the worker computes."""
        if worker in self.own:
            return self.own[worker].urgent(pickled)
        if worker in self.near:
            return self.connections.urgent(worker, pickled)
        return rpc.urgent(self.names[worker], pickled)

    def connect(self, one: int, other: int) -> int | None:
        """Give two workers of this host a socket to each other. If a worker can give them one, return it."""
        if one in self.near and other in self.near:
            self.connections.connect(one, other)
        elif one in self.first and self.first[one] == self.first.get(other):
            return self.first[one]
        else:
            return one if self.far else None
        return None

    def wait(self, wakeup: PollableEvent, timeout: float) -> None:
        """Sleep until an answer comes over a connection, or the event is set, or the time is up."""
        self.connections.wait(wakeup, timeout)
