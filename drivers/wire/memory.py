"""Memory that two processes can see, and how the values of a layout are written to and read from it."""

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from pippy.drivers.base.host_errors import in_words, no_descriptor
from pippy.drivers.wire.value_layout import LeafIndex, ValueLayout, rebuild, rest_from_bytes

_F_ADD_SEALS, _SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1033, 1, 2, 4


class Memory:
    """Bytes that tensors are copied to and from.

    >>> from pippy.drivers.wire.value_layout import layout_of
    >>> memory, value = Memory(mmap.mmap(-1, 4096)), (torch.arange(3), None)
    >>> memory.write(128, layout_of(value), [value[0]], b"")
    >>> memory.read(128, layout_of(value), 0, False)
    (tensor([0, 1, 2]), None)
    """

    def __init__(self, mapped: mmap.mmap | memoryview) -> None:
        self.size = len(mapped)
        self.bytes = memoryview(mapped)
        self._storage = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
        self._windows: dict[torch.dtype, torch.Tensor] = {}

    def write(self, start: int, layout: ValueLayout, tensors: Sequence[torch.Tensor], rest: bytes) -> None:
        """Write the bytes of a value at ``start``."""
        for part, tensor in zip(layout.tensors, tensors):
            window = self._window(part.dtype).set_(
                self._storage, (start + part.offset) // part.dtype.itemsize, part.shape, part.stride
            )
            window.copy_(tensor.detach() if tensor.requires_grad else tensor)
        if rest:
            start += layout.size
            self.bytes[start : start + len(rest)] = rest

    def read(self, start: int, layout: ValueLayout, rest: int, pinned: bool) -> Any:
        """A new value from the bytes at ``start``, of which the last ``rest`` are those of its other leaves."""
        tensors = []
        for part in layout.tensors:
            window = self._window(part.dtype).set_(
                self._storage, (start + part.offset) // part.dtype.itemsize, part.shape, part.stride
            )
            # not a view of anything: a stage may change it in place and have its gradient
            tensor = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, pin_memory=pinned)
            tensor.copy_(window)
            tensors.append(tensor.requires_grad_() if part.requires_grad else tensor)
        if tensors and type(layout.structure) is LeafIndex:
            return tensors[0]
        start += layout.size
        return rebuild(layout, tensors, rest_from_bytes(layout, self.bytes[start : start + rest]))

    def place(self, start: int, layout: ValueLayout) -> "Place":
        """Where the values of a layout are, if they always start at ``start``."""
        windows = []
        for part in layout.tensors:
            offset = (start + part.offset) // part.dtype.itemsize
            windows.append(torch.empty(0, dtype=part.dtype).set_(self._storage, offset, part.shape, part.stride))
        return Place(layout, windows, self.bytes[start + layout.size :])

    def part(self, start: int, size: int) -> memoryview:
        """So many of the bytes."""
        return self.bytes[start : start + size]

    def _window(self, dtype: torch.dtype) -> torch.Tensor:
        # set_ moves one tensor about: making one for each value takes longer than copying a small value
        window = self._windows.get(dtype)
        if window is None:
            window = self._windows[dtype] = torch.empty(0, dtype=dtype)
        return window


class Place:
    """Where one value after another of a layout lies in a memory. The windows to its tensors are made once.

    >>> from pippy.drivers.wire.value_layout import layout_of
    >>> place = Memory(mmap.mmap(-1, 4096)).place(64, layout_of(torch.zeros(3)))
    >>> place.write([torch.ones(3)])
    >>> place.read()
    tensor([1., 1., 1.])
    """

    __slots__ = ("_after", "_layout", "_only", "_windows")

    def __init__(self, layout: ValueLayout, windows: Sequence[torch.Tensor], after: memoryview) -> None:
        self._layout, self._windows, self._after = layout, windows, after
        # most values are one tensor, and nothing beside it
        self._only = windows[0] if windows and type(layout.structure) is LeafIndex else None

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the tensors of a value."""
        for window, tensor in zip(self._windows, tensors):
            window.copy_(tensor.detach() if tensor.requires_grad else tensor)

    def read(self, rest: int = 0) -> Any:
        """A new value, from its tensors and from the so many bytes of its other leaves."""
        # clones keep the strides, as those of a layout have no gaps, and are no views, as in `Memory.read`
        if self._only is not None:
            tensor = self._only.clone()
            return tensor.requires_grad_() if self._layout.tensors[0].requires_grad else tensor
        tensors = [
            window.clone().requires_grad_() if part.requires_grad else window.clone()
            for part, window in zip(self._layout.tensors, self._windows)
        ]
        return rebuild(self._layout, tensors, rest_from_bytes(self._layout, self._after[:rest]))


def private_memory(size: int) -> Memory:
    """Memory of this process."""
    return Memory(mmap.mmap(-1, size))


def create_shared(size: int) -> tuple[int, Memory]:
    """New memory without a name, as a file descriptor to hand over and as memory. It ends with its last user.

    >>> fd, memory = create_shared(4096)
    >>> other = map_shared(fd)
    >>> memory.bytes[:2] = b"ab"
    >>> bytes(other.bytes[:2])
    b'ab'
    >>> os.close(fd)
    """
    with in_words(f"{size:,} bytes of values on their way to another worker"):
        fd = os.memfd_create("pippy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)  # so that too little memory is an error here, and not a SIGBUS later
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
            return fd, map_shared(fd)
        except OSError:
            os.close(fd)
            raise


def map_shared(fd: int) -> Memory:
    """The memory behind a file descriptor."""
    return Memory(mmap.mmap(fd, os.fstat(fd).st_size))


def map_received(ancillary: Sequence[tuple[int, int, bytes]]) -> Memory:
    """The memory whose file descriptor came beside a packet. Raises OSError if this process had none free for it."""
    what, fd = "the memory in which a value came", descriptor_beside(ancillary)
    if fd is None:
        raise no_descriptor(what)
    try:
        with in_words(what):
            return map_shared(fd)
    finally:
        os.close(fd)


def descriptor_beside(ancillary: Sequence[tuple[int, int, bytes]]) -> int | None:
    """The file descriptor that came beside a packet; None if there is none, which is so, too, if none was free for it."""
    return int.from_bytes(ancillary[0][2][:4], "little", signed=True) if ancillary else None
