"""How values travel between workers: a small interface, and what all of its kinds share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Key = tuple[int, int, int]  # (step, slot, micro-batch)


class Interrupted(Exception):
    """The step was abandoned while a receive waited. It never leaves the worker."""


@dataclass(slots=True)
class Sent:
    """What was sent to one peer: how many values, and the bytes of their tensors."""

    values: int = 0
    bytes: int = 0


class Transport(ABC):
    """Passes values between the workers by key.

    A value is a tensor, or anything that holds tensors, and arrives as it was: structure, dtypes, shapes, strides of dense
    tensors, ``requires_grad``. A tensor that is not dense (expanded, sliced) arrives contiguous, and one of a GPU
    on the CPU or on the receiver's ``device``. What arrives shares no memory with what was sent.

    One thread calls all of this, except ``interrupt``, ``waiting_for``, ``deliver`` and ``lose``, which any may call.

    >>> import torch
    >>> from pippy.drivers.transport.in_process import in_process
    >>> first, second = in_process(2)
    >>> first.send(1, (0, 5, 0), {"hidden": torch.ones(2)})
    >>> second.receive((0, 5, 0), source=0)
    {'hidden': tensor([1., 1.])}
    >>> first.sent[1]
    Sent(values=1, bytes=8)
    """

    sent: dict[int, Sent]

    @abstractmethod
    def send(self, to: int, key: Key, value: Any) -> None:
        """Send a value. Never waits for the receiver; the value may be changed or freed afterwards.

        What is sent to a peer that is lost is dropped.
        """

    @abstractmethod
    def receive(self, key: Key, source: int) -> Any:
        """Wait for a value, and take it. Raises Interrupted, or PeerLost if the source is, and the value has not arrived."""

    @abstractmethod
    def wait_any(self, wanted: Sequence[tuple[Key, int]], seconds: float | None = None) -> None:
        """Wait until one of these values, given with their sources, has arrived, or so many seconds have passed.

        Raises as ``receive`` does. ``waiting_for`` says the first.
        """

    @abstractmethod
    def ready(self, key: Key) -> bool:
        """Has the value arrived? Takes in what is there, and waits for nothing."""

    @abstractmethod
    def wait_for(self, fd: int) -> None:
        """Serve all traffic until ``fd`` is readable."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make the receive that waits, and every later one, raise Interrupted, until ``clear_interrupt``."""

    @abstractmethod
    def clear_interrupt(self) -> None:
        """Let receives wait again."""

    @abstractmethod
    def forget(self, below: int) -> None:
        """Drop what has arrived or will arrive for steps before ``below``, and what of them is still to be sent."""

    @abstractmethod
    def waiting_for(self) -> Key | None:
        """What a receive waits for now, if one does."""

    @abstractmethod
    def deliver(self, key: Key, value: Any) -> None:
        """Put in a value that came another way."""

    @abstractmethod
    def lose(self, peer: int) -> None:
        """Say that a peer is lost, where the transport cannot see it by itself."""

    @abstractmethod
    def close(self) -> None:
        """Give up all connections and memory, and what is still queued: it waits for nobody.

        A worker whose values others still need stays in ``wait_for`` until it is told to end.
        """
