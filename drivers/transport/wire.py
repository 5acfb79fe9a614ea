"""A message as it travels: pickled, with its tensors beside it.

Whoever sends pickles, so that what cannot be pickled fails where it is sent; and what cannot be unpickled is answered, and
leaves no hole in the inbox's order.
"""

import io
import pickle
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import cloudpickle
import torch

from pippy.drivers.transport.inbox import Inbox

Packed = tuple[bytes, list[torch.Tensor]]
_OURS = ("builtins", "collections", "pippy", "torch")  # what every process has


@dataclass(frozen=True)
class Undone:
    """The answer to a message that could not be delivered, or whose handler raised.

    >>> print(Undone("Traceback ...").text)
    Traceback ...
    """

    text: str


def pack(value: Any) -> Packed:
    """Pickled, with its tensors beside it; raises if it cannot be.

    >>> data, tensors = pack({"a": torch.ones(1)})
    >>> unpack((data, tensors))
    {'a': tensor([1.])}
    """
    try:
        return _packed(_Quick, value)
    except Exception:  # also what only the other pickler can do
        return _packed(_ByValue, value)


def unpack(packed: Packed) -> Any:
    """What was packed; raises if it cannot be unpickled here."""
    data, tensors = packed
    before, _tables.tensors = getattr(_tables, "tensors", None), tensors
    try:
        return pickle.loads(data)
    finally:
        _tables.tensors = before


def size(packed: Packed) -> int:
    """The bytes of a packed message.

    >>> size((b"four", [torch.zeros(2)]))
    12
    """
    return len(packed[0]) + sum(tensor.nbytes for tensor in packed[1])


def put(inbox: Inbox, sequence: int, packed: Packed, answer: Callable[[Packed], None]) -> None:
    """Put a message that has arrived into an inbox. One that cannot be unpickled is answered at once.

    >>> inbox = Inbox()
    >>> put(inbox, 0, pack("a message"), print)
    >>> inbox.get().message
    'a message'
    >>> inbox.close()
    """
    try:
        message = unpack(packed)
    except Exception:
        inbox.skip(sequence)
        answer(pack(Undone(traceback.format_exc())))
    else:
        inbox.put(sequence, message, lambda value: answer(pack(value)))


class _Foreign(Exception):
    """Something in a message may be unknown to the other process."""


def _packed(kind: "type[_Quick] | type[_ByValue]", value: Any) -> Packed:
    stream = io.BytesIO()
    pickler = kind(stream)
    pickler.dump(value)
    return stream.getvalue(), pickler.tensors


class _Quick(pickle.Pickler):
    """Sets tensors aside; gives up at a class or function that only the controller's process may have.

    Nearly all messages are made of pippy's own classes, and for them it takes half of the other's time.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            self.tensors.append(obj)
            return _tensor, (len(self.tensors) - 1,)
        if isinstance(obj, (type, FunctionType)) and obj.__module__.partition(".")[0] not in _OURS:
            raise _Foreign
        return NotImplemented


class _ByValue(cloudpickle.Pickler):
    """Sets tensors aside. Classes of a script or notebook, of which an input may be, go by value: workers lack them."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return super().reducer_override(obj)
        self.tensors.append(obj)
        return _tensor, (len(self.tensors) - 1,)


_tables = threading.local()


def _tensor(number: int) -> torch.Tensor:
    """The tensor that was set aside, in the message that this thread unpacks."""
    return _tables.tensors[number]
