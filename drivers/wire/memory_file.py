"""Memory for one value, written and read by system calls: memory that is used once is not worth mapping."""

import ctypes
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from pippy.drivers.base.host_errors import in_words, no_descriptor
from pippy.drivers.wire.memory import descriptor_beside
from pippy.drivers.wire.value_layout import ValueLayout, rebuild, rest_from_bytes


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
        fd = descriptor_beside(ancillary)
        if fd is None:
            raise no_descriptor("the memory in which a value came")
        return MemoryFile(fd)

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
