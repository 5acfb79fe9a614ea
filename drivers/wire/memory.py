"""Memory that two processes can see, and how the values of a layout are written to and read from it.

Memory that is used once is not worth mapping: it is written and read by system calls.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from pippy.drivers.base.host_errors import in_words, no_descriptor
from pippy.drivers.wire.value_layout import LeafIndex, ValueLayout, rebuild, rest_from_bytes

_CAME = "the memory in which a value came"
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
    fd = _memory_beside(ancillary)
    try:
        with in_words(_CAME):
            return map_shared(fd)
    finally:
        os.close(fd)


def _memory_beside(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    fd = descriptor_beside(ancillary)
    if fd is None:
        raise no_descriptor(_CAME)
    return fd


def descriptor_beside(ancillary: Sequence[tuple[int, int, bytes]]) -> int | None:
    """The file descriptor that came beside a packet; None if there is none, which is so, too, if none was free for it."""
    return int.from_bytes(ancillary[0][2][:4], "little", signed=True) if ancillary else None


class CopiedBytes(ABC):
    """Bytes that are copied to where they belong: those of a file, or those that come through a socket."""

    def read(self, start: int, layout: ValueLayout, rest: int, pinned: bool) -> Any:
        """The value, of which the last ``rest`` bytes are those of its other leaves."""
        tensors = []
        for part in layout.tensors:
            tensor = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, pin_memory=pinned)
            self._read(_bytes_of(tensor), start + part.offset)
            tensors.append(tensor.requires_grad_() if part.requires_grad else tensor)
        return rebuild(layout, tensors, rest_from_bytes(layout, self.part(start + layout.size, rest)))

    def part(self, start: int, size: int) -> memoryview:
        """So many of the bytes."""
        found = bytearray(size)
        self._read(memoryview(found), start)
        return memoryview(found)

    @abstractmethod
    def _read(self, target: memoryview, start: int) -> None:
        """Fill ``target`` with the bytes from ``start``. Raises OSError if there are fewer."""


class MemoryFile(CopiedBytes):
    """A file in memory without a name. It ends with its last user.

    >>> from pippy.drivers.wire.value_layout import layout_of
    >>> value = (torch.arange(3), None)
    >>> file = MemoryFile.holding(layout_of(value), [value[0]], b"")
    >>> file.read(0, layout_of(value), 0, False)
    (tensor([0, 1, 2]), None)
    >>> file.close()
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @staticmethod
    def holding(layout: ValueLayout, tensors: Sequence[torch.Tensor], rest: bytes) -> "MemoryFile":
        """A new one with the bytes of a value. Raises OSError if there is too little memory."""
        with in_words(f"a value of {layout.size + len(rest):,} bytes on its way to another process"):
            file = MemoryFile(os.memfd_create("pippy", os.MFD_CLOEXEC))
            try:
                for part, tensor in zip(layout.tensors, tensors):
                    own = tensor.detach()
                    if not own.is_cpu or own.stride() != part.stride or own.is_conj() or own.is_neg():
                        own = torch.empty_strided(part.shape, part.stride, dtype=part.dtype).copy_(own)
                    file._write(_bytes_of(own), part.offset)
                file._write(memoryview(rest), layout.size)
            except OSError:
                file.close()
                raise
        return file

    @staticmethod
    def received(ancillary: Sequence[tuple[int, int, bytes]]) -> "MemoryFile":
        """The one that came beside a packet. Raises OSError if this process had no file descriptor free for it."""
        return MemoryFile(_memory_beside(ancillary))

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self.fd)

    def _write(self, source: memoryview, start: int) -> None:
        done = 0
        while done < len(source):
            done += os.pwrite(self.fd, source[done:], start + done)

    def _read(self, target: memoryview, start: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self.fd, [target[done:]], start + done)
            if not count:
                raise OSError(errno.EIO, "the memory of a value ends before the value")
            done += count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor without gaps, which must outlive them."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
