"""How values travel between workers: a small interface, and what all of its implementations share."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pippy.drivers.wire.received_values import ReceivedValues, ValueKey

Post = Callable[[int, ValueKey, Any], None]  # carries a value to a peer, where ``deliver`` is called


@dataclass(slots=True)
class SentCount:
    """What was sent to one peer: how many values, and the bytes of their tensors."""

    values: int = 0
    bytes: int = 0


class Transport(ABC):
    """Passes values between the workers by key.

    A value is a tensor, or anything that holds tensors, and arrives as it was: structure, dtypes, shapes, strides of dense
    tensors, ``requires_grad``. A tensor that is not dense (expanded, sliced) arrives contiguous. What arrives shares
    no memory with what was sent.

    One thread calls all of this, except ``interrupt``, ``waiting_for``, ``ways``, ``deliver`` and ``mark_lost``, which any
    may call.

    >>> import torch
    >>> from pippy.drivers.wire.worker_transport import in_process
    >>> first, second = in_process(2)
    >>> first.send(1, (0, 5, 0), {"hidden": torch.ones(2)})
    >>> second.receive((0, 5, 0), source=0)
    {'hidden': tensor([1., 1.])}
    >>> first.sent[1]
    SentCount(values=1, bytes=8)
    """

    index: int  # of this worker
    sent: dict[int, SentCount]
    received: ReceivedValues

    @property
    def on_host(self) -> "Transport":
        """What passes values from the memory of one host to that of another, past devices."""
        return self

    @abstractmethod
    def send(self, to: int, key: ValueKey, value: Any) -> None:
        """Send a value. Never waits for the receiver; the value may be changed or freed afterwards.

        What is sent to a peer that is lost is dropped.
        """

    def receive(self, key: ValueKey, source: int) -> Any:
        """Wait for a value, and take it.

        Raises Interrupted, or PeerLost if the source is lost and the value has not arrived.
        """
        received = self.received
        while not received.has_now(key):
            if self._take_in(source):
                continue
            received.check_source(key, source)
            received.waiting_for = key
            try:
                received.check(key)
                self._wait_for_traffic(None)
            finally:
                received.waiting_for = None
        return received.take(key)

    def wait_any(self, wanted: Sequence[tuple[ValueKey, int]], seconds: float | None = None) -> None:
        """Wait until one of these values, given with their sources, has arrived, or so many seconds have passed.

        Raises as ``receive`` does. Meanwhile ``waiting_for`` returns the first key.
        """
        received, end = self.received, None if seconds is None else time.monotonic() + seconds
        received.waiting_for = wanted[0][0]
        try:
            while not received.has_any(wanted):
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._wait_for_traffic(left)
        finally:
            received.waiting_for = None

    @abstractmethod
    def ready(self, key: ValueKey) -> bool:
        """Whether the value has arrived. Takes in what is there, and waits for nothing."""

    @abstractmethod
    def wait_for(self, fd: int) -> None:
        """Serve all traffic until ``fd`` is readable."""

    def interrupt(self) -> None:
        """Make the receive that waits, and every later one, raise Interrupted, until ``clear_interrupt``."""
        self.received.interrupt()

    def clear_interrupt(self) -> None:
        """Let receives wait again."""
        self.received.clear_interrupt()

    @abstractmethod
    def discard_before(self, step: int) -> None:
        """Drop the values of earlier steps: those that have arrived, those that will, and those not sent yet."""

    def finish(self) -> None:  # noqa: B027
        """Wait until the device has computed all that it was given, and all values are sent. Raises what it failed with."""

    def drop_unsent(self) -> None:  # noqa: B027
        """Drop the values that are not copied from the device yet: their step has failed."""

    def trim(self) -> None:  # noqa: B027
        """Give up memory that is kept for values to come: what needed it is gone."""

    def ways(self) -> dict[int, str]:
        """To which peers values stay on devices, and to which they do not, with the reason. From any thread."""
        return {}

    def waiting_for(self) -> ValueKey | None:
        """What a receive waits for now, if one does."""
        return self.received.waiting_for

    def deliver(self, key: ValueKey, value: Any) -> None:
        """Take in a value that did not come over a connection."""
        self.received.deliver(key, value)

    def mark_lost(self, peer: int) -> None:
        """Note that a peer is lost, where the transport cannot see it by itself."""
        self.received.mark_lost(peer)

    def forget(self, peers: Collection[int]) -> None:
        """Other processes are in the places of these peers. Drop what connects this one with those that were there."""
        self.received.forget(peers)

    @abstractmethod
    def close(self) -> None:
        """Close all connections, free the memory, and drop what is still queued, without waiting for anybody.

        A worker whose values others still need stays in ``wait_for`` until it is told to end.
        """

    def _take_in(self, source: int) -> bool:
        """Take in what ``source`` has sent, before a receive sleeps. True if something came."""
        return False

    @abstractmethod
    def _wait_for_traffic(self, seconds: float | None) -> None:
        """Take in what comes next; return after so many seconds if nothing comes."""
