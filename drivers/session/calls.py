"""Calls to workers: where those are, what carries messages to them, and what they answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch.futures import Future

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.wire.messages.message_queue import DeliveryFailure
from pippy.drivers.wire.pickling import Pickled, unpickle
from pippy.drivers.wire.pollable_event import PollableEvent

Value = TypeVar("Value")


@dataclass(frozen=True)
class Address:
    """Where a worker is: its name, its host and its process. Those with the same text of ``memory`` can share memory. If it
    ``is_here``, this process can ask the system what that process does.

    >>> Address("first", "localhost", 4711).name
    'first'
    """

    name: str
    host: str
    pid: int
    memory: str = ""
    is_here: bool = False


@dataclass(eq=False)
class PendingCall:
    """A call to one worker. ``done`` says whether the worker has answered, and ``answer`` is what it answered.

    >>> import torch
    >>> from pippy.drivers.wire.pickling import pickle_message
    >>> future = torch.futures.Future()
    >>> call = PendingCall(0, "Ping", future)
    >>> call.done
    False
    >>> future.set_result(pickle_message("pong"))
    >>> call.done, call.answer
    (True, 'pong')
    """

    worker: int
    what: str
    future: Any = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether the call is over."""
        return self.future.done()

    @property
    def answer(self) -> Any:
        """What the worker answered."""
        assert self.done, "only a call that completed() has yielded has an answer"
        value = unpickle(self.future.value())
        if isinstance(value, DeliveryFailure):
            raise ClusterError(f"worker {self.worker} could not take a message of type {self.what}:\n{value.text}")
        return value


class Messages(Protocol):
    """Carries messages to workers. A call for a worker that is known to be gone raises a ConnectionError."""

    def post(self, worker: int, number: int, pickled: Pickled) -> "Future[Pickled]":
        """Put a message into a worker's queue; the future has what its main thread answers."""

    def urgent(self, worker: int, pickled: Pickled) -> "Future[Pickled]":
        """Send a message that is answered even while the worker computes."""

    def connect(self, one: int, other: int) -> int | None:
        """Let two workers pass values, before what is posted to them from now on.

        If a worker is to do that, return it.
        """

    def wait(self, wakeup: PollableEvent, timeout: float) -> None:
        """Sleep until an answer comes, or the event is set, or the time is up."""


def outcome(read: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    """An answer, and no error; or nothing, and why it cannot be read. What a handler of the script raises goes on.

    >>> outcome(lambda: 3)
    (3, None)
    >>> outcome(lambda: 3 // 0)
    (None, ZeroDivisionError('integer division or modulo by zero'))
    """
    try:
        return read(), None
    except Exception as error:  # RPC raises errors of all kinds
        if succeeds(read):
            raise  # it is of a handler of the script, for a signal
        return None, error


def succeeds(read: Callable[[], Any]) -> bool:
    """Whether an answer can be read.

    >>> succeeds(lambda: 3), succeeds(lambda: 3 // 0)
    (True, False)
    """
    with uninterrupted():
        try:
            read()
        except Exception:
            return False
    return True


def last_line(error: Exception) -> str:
    """The last line of an error's text.

    >>> last_line(ValueError("first\\nlast"))
    'last'
    """
    return (str(error).strip() or repr(error)).splitlines()[-1]
