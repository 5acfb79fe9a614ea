"""Values by messages that others carry: torch's RPC between hosts, a function call between threads."""

import copy
import select
from collections.abc import Callable
from typing import Any

import torch

from pippy.drivers.transport.interface import Key, Sent
from pippy.drivers.transport.layout import TensorPlace, is_plain_tensor, layout_of
from pippy.drivers.transport.mailbox import Mailbox, MailboxTransport
from pippy.ir.trees import map_leaves, map_tensors, tensors


class RpcTransport(MailboxTransport):
    """The transport of worker ``index``. ``post(to, key, value)`` carries a value; at its end ``deliver`` is called.

    ``post`` must not wait for the receiver. What it gets is a copy on the CPU that nobody changes. Peers that are lost must
    be told with ``lose``.

    >>> there = RpcTransport(1, post=print)
    >>> here = RpcTransport(0, post=lambda to, key, value: there.deliver(key, value))
    >>> here.send(1, (0, 2, 0), torch.ones(2))
    >>> there.receive((0, 2, 0), source=0)
    tensor([1., 1.])
    """

    def __init__(
        self, index: int, post: Callable[[int, Key, Any], None], device: torch.device | str | None = None
    ) -> None:
        self.index, self.post = index, post
        self.device = torch.device(device) if device is not None else None
        self.sent: dict[int, Sent] = {}
        self.mailbox = Mailbox()
        self._poll = select.poll()
        self._bell = self.mailbox.bell.fileno()
        self._poll.register(self._bell, select.POLLIN)

    def send(self, to: int, key: Key, value: Any) -> None:
        own = copied(value)
        sent = self.sent.setdefault(to, Sent())
        sent.values += 1
        sent.bytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors(own) if is_plain_tensor(tensor))
        if to == self.index:
            self.mailbox.put(key, own)
        elif not self.mailbox.lost(to):
            self.post(to, key, own)

    def receive(self, key: Key, source: int) -> Any:
        box = self.mailbox
        box.check(key)
        while not box.has(key):
            box.check_source(key, source)
            box.waits = key
            try:
                box.check(key)
                self._wait()
                box.check(key)
            finally:
                box.waits = None
        value = box.take(key)
        return value if self.device is None else map_tensors(self._on_device, value)

    def ready(self, key: Key) -> bool:
        return self.mailbox.has(key)

    def wait_for(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)
        try:
            while fd not in self._wait():
                pass
        finally:
            self._poll.unregister(fd)

    def forget(self, below: int) -> None:
        self.mailbox.forget(below)

    def close(self) -> None:
        self.mailbox.close()

    def _wait_for_something(self, seconds: float | None) -> None:
        self._wait(seconds)

    def _wait(self, seconds: float | None = None) -> set[int]:
        found = {fd for fd, _ in self._poll.poll(None if seconds is None else seconds * 1e3)}
        if self._bell in found:
            self.mailbox.bell.quiet()
        return found

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)


def copied(value: Any) -> Any:
    """A value on the CPU that shares nothing with the given one.

    >>> twos = torch.full((2, 3), 2.0).t()
    >>> copy = copied([twos, "a"])
    >>> twos.zero_().sum(), copy[0].sum(), copy[0].stride()
    (tensor(0.), tensor(12.), (1, 3))
    """
    places = iter(layout_of(value).places)

    def own(leaf: Any) -> Any:
        if is_plain_tensor(leaf):
            return _copied_tensor(leaf, next(places))
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copy.deepcopy(leaf)

    return map_leaves(own, value)


def _copied_tensor(tensor: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    own = torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
    own.copy_(tensor.detach())
    return own.requires_grad_(place.requires_grad)
