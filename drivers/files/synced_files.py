"""Files that are on the disk when they are said to be.

After a write, fsync is called for the file, and for the folder that has its name. Without it, a file may be empty after a power
failure, even if it was closed long before.
"""

import hashlib
import os
import socket
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import FileIO
from typing import Any

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.base.interrupts import uninterrupted

CHUNK = 1 << 24  # bytes that are written or read at a time
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


@dataclass(frozen=True)
class WrittenFile:
    """A file's name, its length, and the hash of each of its pieces.

    >>> WrittenFile("values.pt", 3, {"all": "2c26b4"}).bytes
    3
    """

    name: str
    bytes: int
    hashes: dict[str, str]


def not_there(path: str) -> CheckpointError:
    """The error of a process whose host does not see a file or folder of a checkpoint."""
    return CheckpointError(
        f"{path} is not there on {socket.gethostname()}; give a folder on a file system that all hosts share, at the same path"
    )


def open_unbuffered(path: str, mode: str) -> FileIO:
    """Open a file without a buffer; modes are those of `open`. It is closed when nothing refers to it, also after Ctrl-C.

    >>> with open_unbuffered("/dev/null", "w") as file:
    ...     file.write(b"abc")
    3
    """
    with uninterrupted():  # not to wait for the other end, where the path is that of a pipe
        return FileIO(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))


def write_file(
    folder: str, name: str, pieces: Iterable[tuple[str, Any]], goes_on: Callable[[], None] = lambda: None
) -> WrittenFile:
    """Write a new file, piece by piece, each with a name for its hash. ``goes_on`` raises if the work was given up.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = write_file(folder, "note", [("all", b"abc")])
    ...     print(written.bytes, written.hashes["all"][:6])
    3 ba7816
    """
    hashes, length = {}, 0
    with open_unbuffered(os.path.join(folder, name), "x") as file:
        for piece, data in pieces:
            view, digest = memoryview(data), hashlib.sha256()
            for start in range(0, len(view), CHUNK):
                goes_on()
                part = view[start : start + CHUNK]
                digest.update(part)
                while part:
                    part = part[os.write(file.fileno(), part) :]
            hashes[piece] = digest.hexdigest()
            length += len(view)
        os.fsync(file.fileno())
    return WrittenFile(name, length, hashes)


def sync_folder(folder: str) -> None:
    """Put the names of a folder's files on the disk."""
    with uninterrupted():  # or Ctrl-C might leave it open
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def regular_size(path: str) -> int:
    """The bytes of a regular file. Raises for all else, such as a pipe, which might never give a byte, or a device.

    >>> regular_size("/dev/zero")
    Traceback (most recent call last):
    pippy.drivers.base.errors.CheckpointError: /dev/zero is a device, and not a file; put ...
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise CheckpointError(f"{path} is {kind}, and not a file; put the file back, or load another checkpoint")
    return found.st_size


def read_into(path: str, offset: int, data: memoryview) -> None:
    """Fill ``data`` with the bytes of a file from ``offset`` on.

    >>> data = bytearray(3)
    >>> read_into(__file__, 0, memoryview(data))
    >>> bytes(data)
    b'\"\"\"'
    """
    regular_size(path)
    with open_unbuffered(path, "r") as file:
        while data:
            count = os.preadv(file.fileno(), [data[:CHUNK]], offset)
            if not count:
                raise CheckpointError(f"{path} ends {len(data)} bytes too soon; it is damaged, or was cut off")
            data, offset = data[count:], offset + count


def read_file(path: str) -> bytes:
    """All of a small file."""
    data = bytearray(regular_size(path))
    read_into(path, 0, memoryview(data))
    return bytes(data)


def check_hash(what: str, data: Any, expected: str | None) -> None:
    """Raise if the hash of ``data`` is not the expected one. Without an expected hash, do nothing."""
    if expected is not None and hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(
            f"{what} is damaged: the hash of its bytes is not the hash of what was written; load another checkpoint"
        )
