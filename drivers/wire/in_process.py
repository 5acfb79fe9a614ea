"""A transport between the threads of one process, for tests and for workers that share a process."""

from typing import Any

from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.transport import Transport
from pippy.drivers.wire.worker_transport import WorkerTransport


def in_process(workers: int) -> list[Transport]:
    """The transports of so many workers; each is for a thread of its own.

    >>> import torch
    >>> first, second = in_process(2)
    >>> first.send(1, (0, 0, 0), torch.ones(1))
    >>> second.ready((0, 0, 0))
    True
    """
    transports: list[Transport] = []

    def post(to: int, key: ValueKey, value: Any) -> None:
        transports[to].deliver(key, value)

    transports.extend(WorkerTransport(index, far=range(workers), post=post) for index in range(workers))
    return transports
