"""What the runtime asks of a device that computes beside the host. `Accelerator` is torch's; a test may derive another one.

The host only starts what the device is to do, in *streams*. A stream does one thing after another, and several streams work at
the same time. An *event* is a place in a stream: another stream, or the host, can wait until that is reached. A device's
memory belongs to the stream in which it was allocated; when it is freed, that stream uses it again at once.

Another process on the same host can open memory and events of this one by their *handles*, as torch.multiprocessing does. It
can wait for an event, also on another device, once this process has recorded it: a wait is for what was recorded last.

Nothing here waits for the device but `Event.synchronize`. Workers on the CPU have no accelerator.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast

import torch


class NotShared(Exception):
    """Two processes cannot use one memory of a device; the text says why. Values go through the host's memory then."""


class Event(Protocol):
    """A place in a stream, as `torch.Event`."""

    def record(self, stream: Any) -> None:
        """Put it behind all that the stream has been given."""

    def query(self) -> bool:
        """Whether the place is reached."""

    def synchronize(self) -> None:
        """Let this thread sleep until the place is reached. Raises what the device failed with."""

    def elapsed_time(self, end_event: Any) -> float:
        """The milliseconds from this event to another. Both are timed, and have been reached."""


class Stream(Protocol):
    """As `torch.Stream`."""

    def wait_event(self, event: Any) -> None:
        """Do what comes from now on after the event."""


class Accelerator:
    """A device of one worker other than the CPU; ``device`` is torch's name of it."""

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device, self.module = torch.device(device.type, index), cast(Any, torch.get_device_module(device))
        self._sleeps = {"blocking": True} if device.type == "cuda" else {}  # else a thread that waits is busy

    def set_current(self) -> None:
        """Make it the current device of this thread: where ``device="cuda"`` and Triton's kernels go."""
        self.module.set_device(self.device)

    def new_stream(self) -> Stream:
        """A stream beside the one in which stages compute."""
        return cast(Stream, self.module.Stream(self.device))

    def current_stream(self) -> Stream:
        """The stream of this thread. Stages compute in it."""
        return cast(Stream, self.module.current_stream(self.device))

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """Inside, the thread gives what it starts to this stream."""
        return cast(AbstractContextManager[Any], self.module.stream(stream))

    def event(self, timed: bool = False) -> Event:
        """A new event; ``timed``, if its time is to be read."""
        return cast(Event, self.module.Event(enable_timing=timed, **self._sleeps))

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device."""
        return tensor.device == self.device

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether the host may read a tensor without the device."""
        return tensor.device.type == "cpu"

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in memory that the device copies from while the host goes on."""
        return tensor.is_pinned()

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the device, in memory of the current stream."""
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def empty_pinned(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of the host, in pinned memory."""
        return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy, in the current stream. One of the two may be on the host: in pinned memory."""
        target.copy_(source, non_blocking=True)

    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        """When this tensor is freed, use its memory again only after what ``stream`` has been given by then."""
        tensor.record_stream(cast(Any, stream))

    def free_cache(self) -> None:
        """Give back what was freed: another worker may compute on the same device."""
        self.module.empty_cache()

    def share(self, size: int) -> tuple[torch.Tensor, bytes]:
        """New memory as a tensor of bytes, and its handle. Raises NotShared if there can be none."""
        with self._sharing():
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            return memory, pickle.dumps(memory.untyped_storage()._share_cuda_())

    def open(self, handle: bytes) -> torch.Tensor:
        """Memory that another process shares, of the same device or another one. Raises NotShared if it cannot be used."""
        with self._sharing():
            # opened on this device, also if it is another one's memory, which may not be visible here
            storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *pickle.loads(handle)[1:])
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def shared_event(self) -> tuple[Event, bytes]:
        """A new event that this process records, and its handle. Raises NotShared if there can be none."""
        with self._sharing():
            event = self.module.Event(interprocess=True)
            return event, event.ipc_handle()

    def open_event(self, handle: bytes) -> Event:
        """An event that another process records. Raises NotShared if it cannot be used."""
        with self._sharing():
            return cast(Event, self.module.Event.from_ipc_handle(self.device, handle))

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        if self.device.type != "cuda" or torch.version.hip:
            kind = "AMD" if torch.version.hip else repr(self.device.type)
            raise NotShared(f"two processes cannot yet use one memory of a device of type {kind}")
        try:
            yield
        except RuntimeError as error:  # of CUDA; what follows the first line is about other errors
            raise NotShared(str(error).partition("\n")[0]) from error


def accelerator_of(device: str | torch.device) -> Accelerator | None:
    """The accelerator that is a device of torch; None for the CPU.

    Raises if the device does not work.

    >>> print(accelerator_of("cpu"))
    None
    """
    found = torch.device(device)
    if found.type == "cpu":
        return None
    accelerator = Accelerator(found)
    torch.empty(0, device=accelerator.device)  # a device that does not work fails here
    return accelerator
