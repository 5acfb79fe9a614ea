"""What the runtime needs of a device that computes beside the host: one interface, and torch's devices behind it.

The host only starts what the device is to do, in *streams*. A stream does one thing after another, and several streams work at
the same time. An *event* is a place in a stream: another stream, or the host, can wait until that is reached. A device's
memory belongs to the stream in which it was allocated; when it is freed, that stream uses it again at once.

Two processes can use a *block* of one device's memory, if its owner shares it and the other process opens it. *Words* in memory
of the host that both see order what their devices do with it: a stream writes a number there, or waits for one.

Nothing here waits for the device but `Event.synchronize`. Workers on the CPU have no accelerator.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol, cast

import torch

from pippy.drivers.wire.gpu.cuda_driver import CudaDriver, NotShared


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


class Block(Protocol):
    """Memory of a device that two processes use, as a tensor of bytes. Another process finds it by its ``handle``."""

    memory: torch.Tensor
    handle: bytes

    def close(self) -> None:
        """Free it, or if it is another process's, use it no more. Its owner frees it last."""


class Words(Protocol):
    """Numbers of 32 bits in memory of the host, as the streams of a device see them."""

    def write(self, index: int, value: int) -> None:
        """Write one behind all that the current stream has been given."""

    def wait(self, index: int, value: int) -> None:
        """Let the current stream go on when it is no less than ``value``."""

    def close(self) -> None:
        """No stream uses them any more."""


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

    def share(self, size: int) -> Block:
        """A new block. Raises NotShared if there can be none."""
        raise NotShared(f"there is no way yet for two processes to use memory of a device of type {self.device.type!r}")

    def open(self, handle: bytes, size: int) -> Block:
        """A block that another process shares, of the same device or another one. Raises NotShared if it cannot be used."""
        raise NotShared(f"there is no way yet for two processes to use memory of a device of type {self.device.type!r}")

    def words(self, host: torch.Tensor) -> Words:
        """The words in some memory of the host. Raises NotShared if the device cannot use them."""
        raise NotShared(f"a device of type {self.device.type!r} has no way yet to wait for another process")


class TorchAccelerator(Accelerator):
    """A device of torch other than the CPU: a GPU."""

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device, self.module = torch.device(device.type, index), cast(Any, torch.get_device_module(device))
        self.memory_device = self.device  # of the tensors that are made of blocks
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

    def share(self, size: int) -> Block:
        if self.device.type != "cuda":
            return super().share(size)
        address = self._driver.allocate(size)
        try:
            return _CudaBlock(self, address, size, self._driver.handle_of(address), self._driver.free)
        except NotShared:
            self._driver.free(address)
            raise

    def open(self, handle: bytes, size: int) -> Block:
        if self.device.type != "cuda":
            return super().open(handle, size)
        return _CudaBlock(self, self._driver.map(handle), size, handle, self._driver.unmap)

    def words(self, host: torch.Tensor) -> Words:
        return _CudaWords(self, host) if self.device.type == "cuda" else super().words(host)

    @cached_property
    def _driver(self) -> CudaDriver:
        return CudaDriver()


class _CudaBlock:
    def __init__(
        self, accelerator: TorchAccelerator, address: int, size: int, handle: bytes, end: Callable[[int], None]
    ) -> None:
        # it counts as memory of this process's device: another one's can be mapped without being visible here
        device = accelerator.memory_device
        storage = torch._C._construct_storage_from_data_pointer(address, device, size)
        self.memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self.handle, self._address, self._end = handle, address, end

    def close(self) -> None:
        self._end(self._address)


class _CudaWords:
    def __init__(self, accelerator: TorchAccelerator, host: torch.Tensor) -> None:
        self._accelerator, self._driver, self._host = accelerator, accelerator._driver, host
        self._address = self._driver.register(host.data_ptr(), host.nbytes)

    def write(self, index: int, value: int) -> None:
        self._driver.write_word(self._stream(), self._address + 4 * index, value)

    def wait(self, index: int, value: int) -> None:
        self._driver.wait_for_word(self._stream(), self._address + 4 * index, value)

    def close(self) -> None:
        self._driver.unregister(self._host.data_ptr())

    def _stream(self) -> int:
        return int(cast(Any, self._accelerator.current_stream()).cuda_stream)


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
