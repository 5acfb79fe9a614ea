"""Values by messages that others carry: torch's RPC between hosts, a function call between threads."""

import copy
import select
from collections.abc import Callable
from typing import Any

import torch

from pippy.drivers.wire.received_values import ReceivedValues, ValueKey
from pippy.drivers.wire.transport import SentCount, Transport
from pippy.drivers.wire.value_layout import TensorLayout, ValueLayout, is_plain_tensor, layout_of
from pippy.ir.base.sparse_tensors import from_parts, is_sparse, parts_of
from pippy.ir.base.trees import map_leaves

Post = Callable[[int, ValueKey, Any], None]  # carries a value to a peer, where ``deliver`` is called


class RpcTransport(Transport):
    """The transport of worker ``index``. ``post(to, key, value)`` carries a value; at its end ``deliver`` is called.

    ``post`` must not wait for the receiver. What it gets is a copy on the CPU that nobody changes. ``mark_lost`` must be
    called for a peer that is lost.

    >>> there = RpcTransport(1, post=print)
    >>> here = RpcTransport(0, post=lambda to, key, value: there.deliver(key, value))
    >>> here.send(1, (0, 2, 0), torch.ones(2))
    >>> there.receive((0, 2, 0), source=0)
    tensor([1., 1.])
    """

    def __init__(self, index: int, post: Post) -> None:
        self.index = index
        self.sent: dict[int, SentCount] = {}
        self.received = ReceivedValues()
        self.posted = PostedValues(post, self.received)
        self._poll = select.poll()
        self._wakeup = self.received.wakeup.fileno()
        self._poll.register(self._wakeup, select.POLLIN)

    def send(self, to: int, key: ValueKey, value: Any) -> None:
        if to == self.index:
            self.received.put(key, copied(value))
        else:
            self.posted.send(to, key, value, self.sent.setdefault(to, SentCount()))

    def ready(self, key: ValueKey) -> bool:
        return self.received.has(key)

    def wait_for(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)
        try:
            while fd not in self._wait():
                pass
        finally:
            self._poll.unregister(fd)

    def discard_before(self, step: int) -> None:
        self.received.discard_before(step)

    def close(self) -> None:
        self.received.close()

    def _wait_for_traffic(self, seconds: float | None) -> None:
        self._wait(seconds)

    def _wait(self, seconds: float | None = None) -> set[int]:
        found = {fd for fd, _ in self._poll.poll(None if seconds is None else seconds * 1e3)}
        if self._wakeup in found:
            self.received.woken()
        return found


class PostedValues:
    """Sends values by ``post`` to peers, unless ``received`` knows that they are lost.

    >>> posted = PostedValues(lambda to, key, value: print(to, key, value), ReceivedValues())
    >>> posted.send(1, (0, 2, 0), torch.ones(2), count := SentCount())
    1 (0, 2, 0) tensor([1., 1.])
    >>> count
    SentCount(values=1, bytes=8)
    """

    def __init__(self, post: Post, received: ReceivedValues) -> None:
        self.post, self.received = post, received

    def send(self, to: int, key: ValueKey, value: Any, sent: SentCount) -> None:
        """Post a copy of a value, and count it."""
        layout = layout_of(value)
        own = copied(value, layout)
        sent.values += 1
        sent.bytes += layout.payload
        if not self.received.is_lost(to):
            self.post(to, key, own)


def copied(value: Any, layout: ValueLayout | None = None) -> Any:
    """A value on the CPU that shares nothing with the given one. ``layout`` is the value's, if it is known.

    >>> twos = torch.full((2, 3), 2.0).t()
    >>> copy = copied([twos, "a"])
    >>> twos.zero_().sum(), copy[0].sum(), copy[0].stride()
    (tensor(0.), tensor(12.), (1, 3))
    """
    layouts = iter((layout or layout_of(value)).tensors)

    def own(leaf: Any) -> Any:
        if is_plain_tensor(leaf):
            return _copied_tensor(leaf, next(layouts))
        if isinstance(leaf, torch.Tensor) and is_sparse(leaf):
            form, parts = parts_of(leaf)
            return from_parts(form, [_copied_tensor(part, next(layouts)) for part in parts])
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copy.deepcopy(leaf)

    return map_leaves(own, value)


def _copied_tensor(tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    own = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")
    own.copy_(tensor.detach())
    return own.requires_grad_(layout.requires_grad)
