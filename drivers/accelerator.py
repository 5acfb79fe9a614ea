"""What the runtime needs of a device that computes beside the host: one interface, and torch's devices behind it.

The host only starts what the device is to do, in *streams*. A stream does one thing after another, and several streams work at
the same time. An *event* is a place in a stream: another stream, or the host, can wait until that is reached. A device's
memory belongs to the stream in which it was allocated; when it is freed, that stream uses it again at once.

Nothing here waits for the device but `Event.synchronize`. Workers on the CPU have no accelerator.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch


class Event(Protocol):
    """A place in a stream, as `torch.Event`."""

    def record(self, stream: Any) -> None:
        """Put it behind all that the stream has been given."""

    def synchronize(self) -> None:
        """Let this thread sleep until the place is reached. Raises what the device failed with."""

    def elapsed_time(self, end_event: Any) -> float:
        """The milliseconds from this event to another. Both are timed, and have been reached."""


class Stream(Protocol):
    """As `torch.Stream`."""

    def wait_event(self, event: Any) -> None:
        """Do what comes from now on after the event."""


class Accelerator(ABC):
    """A device of one worker; ``device`` is torch's name of it."""

    device: torch.device

    @abstractmethod
    def set_current(self) -> None:
        """Make it the current device of this thread: where ``device="cuda"`` and Triton's kernels go."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream beside the one in which stages compute."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream of this thread. Stages compute in it."""

    @abstractmethod
    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """Inside, the thread gives what it starts to this stream."""

    @abstractmethod
    def event(self, timed: bool = False) -> Event:
        """A new event; ``timed``, if its time is to be read."""

    @abstractmethod
    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device."""

    @abstractmethod
    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether the host may read a tensor without the device."""

    @abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in memory that the device copies from while the host goes on."""

    @abstractmethod
    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the device, in memory of the current stream."""

    @abstractmethod
    def empty_pinned(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of the host, in pinned memory."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy, in the current stream. One of the two may be on the host: in pinned memory."""

    @abstractmethod
    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        """When this tensor is freed, use its memory again only after what ``stream`` has been given by then."""

    @abstractmethod
    def free_cache(self) -> None:
        """Give back what was freed: another worker may compute on the same device."""


class TorchAccelerator(Accelerator):
    """A device of torch other than the CPU: a GPU."""

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device, self.module = torch.device(device.type, index), cast(Any, torch.get_device_module(device))
        self._sleeps = {"blocking": True} if device.type == "cuda" else {}  # else a thread that waits is busy

    def set_current(self) -> None:
        self.module.set_device(self.device)

    def new_stream(self) -> Stream:
        return cast(Stream, self.module.Stream(self.device))

    def current_stream(self) -> Stream:
        return cast(Stream, self.module.current_stream(self.device))

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self.module.stream(stream))

    def event(self, timed: bool = False) -> Event:
        return cast(Event, self.module.Event(enable_timing=timed, **self._sleeps))

    def is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def empty_pinned(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(cast(Any, stream))

    def free_cache(self) -> None:
        self.module.empty_cache()


def accelerator_of(device: str | torch.device) -> Accelerator | None:
    """The accelerator that is a device of torch; None for the CPU.

    Raises if the device does not work.

    >>> print(accelerator_of("cpu"))
    None
    """
    found = torch.device(device)
    if found.type == "cpu":
        return None
    accelerator = TorchAccelerator(found)
    torch.empty(0, device=accelerator.device)  # a device that does not work fails here
    return accelerator
