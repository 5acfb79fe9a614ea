"""A page of numbers that two processes of a host see: how far the devices of both are with a block of memory.

    word            written by
    FILLED          the sender's device: the number of the last value that it has copied to the block
    TAKEN           the receiver's device: how many values it has copied out
    CLAIMS, each    the receiver: as what it has told its device to copy out a value; 0 if it has not
    RETIRED         the sender: nothing comes through the block any more
    ANSWER          the receiver: whether it has mapped the block

The process that makes the page has it open; another one of the same user finds it there, so no file is left behind.
"""

import os
from contextlib import suppress
from typing import NamedTuple

import torch

from pippy.drivers.wire.gpu.cuda_driver import NotShared
from pippy.drivers.wire.memory import Memory, create_shared, map_shared

FILLED, TAKEN, RETIRED, ANSWER, _TOKEN = 0, 16, 32, 48, 56  # no two processes write to one cache line
CLAIMS, CLAIM_COUNT = 64, 960
NO_ANSWER, MAPPED, NOT_MAPPED = 0, 1, 2
LAST = 1 << 30  # a block is replaced before its numbers come to an end
_WORDS, _SIZE, _TEXT, _TOKEN_SIZE = 4096, 8192, 4096, 16


class PageName(NamedTuple):
    """Where another process finds a page, and what it begins with."""

    path: str
    token: bytes


class SharedWords:
    """The page, and a text beside the numbers.

    >>> here = SharedWords.create()
    >>> there = SharedWords.find(here.name)
    >>> here.words[FILLED], here.text = 3, "why not"
    >>> there.words[FILLED], there.text
    (3, 'why not')
    >>> here.close()
    """

    def __init__(self, memory: Memory, name: PageName, fd: int | None = None) -> None:
        self._memory, self.name, self._fd = memory, name, fd
        self.words = memory.bytes[:_WORDS].cast("I")
        self.host = torch.frombuffer(memory.bytes, dtype=torch.uint8)

    @staticmethod
    def create() -> "SharedWords":
        """A new page. Raises NotShared if there is no memory for it, or no file descriptor."""
        try:
            fd, memory = create_shared(_SIZE)
        except OSError as error:
            raise NotShared(str(error)) from error
        token = os.urandom(_TOKEN_SIZE)
        memory.bytes[4 * _TOKEN : 4 * _TOKEN + _TOKEN_SIZE] = token
        return SharedWords(memory, PageName(f"/proc/{os.getpid()}/fd/{fd}", token), fd)

    @staticmethod
    def find(name: PageName) -> "SharedWords":
        """The page of another process. Raises NotShared if it is not to be seen from here."""
        try:
            fd = os.open(name.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotShared(f"the open files of the sender are not to be seen: {error}") from error
        try:
            if os.fstat(fd).st_size != _SIZE:
                raise NotShared("the sender is in another container: its open files are not those that are seen here")
            memory = map_shared(fd)
        except OSError as error:
            raise NotShared(str(error)) from error
        finally:
            os.close(fd)
        if memory.bytes[4 * _TOKEN : 4 * _TOKEN + _TOKEN_SIZE] != name.token:
            raise NotShared("the sender is in another container: its open files are not those that are seen here")
        return SharedWords(memory, name)

    @property
    def text(self) -> str:
        """What the receiver says beside its answer."""
        return bytes(self._memory.bytes[_TEXT:]).rstrip(b"\0").decode(errors="replace")

    @text.setter
    def text(self, said: str) -> None:
        data = said.encode()[: _SIZE - _TEXT]
        self._memory.bytes[_TEXT : _TEXT + len(data)] = data

    def close(self) -> None:
        """Nobody else needs to find the page any more: it stays for those that have."""
        if self._fd is not None:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = None
