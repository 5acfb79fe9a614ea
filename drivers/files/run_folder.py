"""The folder of a run: its checkpoints, each in a folder of its own. A checkpoint is complete, or it is not there.

    run/
      step-10/               a checkpoint
      step-20/               a later one
      .saving-step-30-5f0c/  one that is being written; one rename makes it step-30
      .lock                  locked by the process that writes

A process that is killed leaves a folder whose name begins with a dot. Nobody reads it, and the next save removes it.
Checkpoints are numbered, each with one more than those before it: the largest number is the newest checkpoint.
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from io import FileIO
from typing import Any

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.manifest import FORMAT, MANIFEST, VERSION, WHOLE_HASH, read_manifest, sealed
from pippy.drivers.files.synced_files import open_unbuffered, sync_folder, write_file
from pippy.ir.base import source

_SAVING, _REMOVED, _LOCK = ".saving-", ".removed-", ".lock"


def checkpoints_in(folder: str) -> list[str]:
    """The paths of a run's checkpoints, the oldest first. Raises if one is damaged: it may be the newest.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints_in(folder)
    []
    """
    checkpoints, damaged = _numbered_checkpoints(folder)
    for error in damaged:
        raise error
    return [path for _, path in checkpoints]


def _numbered_checkpoints(folder: str) -> tuple[list[tuple[int, str]], list[CheckpointError]]:
    """The checkpoints with their numbers, in this order, and the errors of those that are damaged."""
    checkpoints, damaged = [], []
    for entry in os.scandir(folder):
        if entry.is_dir() and not entry.name.startswith("."):
            try:
                if manifest := read_manifest(entry.path):
                    checkpoints.append((manifest["number"], entry.path))
            except CheckpointError as error:
                damaged.append(error)
    return sorted(checkpoints), damaged


class NewCheckpoint:
    """A checkpoint that is being written to ``path``, beside those of a run. Only one can be at a time.

    `put_in_place` makes it a checkpoint of the run. If the context ends before that, what was written is removed.
    """

    def __init__(self, folder: str, step: int | None) -> None:
        os.makedirs(folder, exist_ok=True)
        self.folder = folder
        self._lock: FileIO | None = _locked(folder)
        try:
            self._remove_left_over()
            there, damaged = _numbered_checkpoints(folder)
            for error in damaged:  # or the script would learn of them when it is started again, and cannot load the run
                source.warn(str(error))
            self.number = 1 + max((number for number, _ in there), default=0)
            self.name = self._free_name("save" if step is None else "step", self.number if step is None else step)
            self.path = os.path.join(folder, f"{_SAVING}{self.name}-{secrets.token_hex(4)}")
            os.mkdir(self.path)
        except BaseException:
            self._unlock()
            raise

    def __enter__(self) -> "NewCheckpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def _free_name(self, word: str, number: int) -> str:
        """A name for a checkpoint of this step. If there is one already, the name gets a second number, and the other stays."""
        name, again = f"{word}-{number}", 1
        while os.path.lexists(os.path.join(self.folder, name)):
            again += 1
            name = f"{word}-{number}.{again}"
        return name

    def put_in_place(self, content: Mapping[str, Any]) -> str:
        """Write the manifest, ``content``, and rename the folder. All other files must be on the disk."""
        manifest = {"format": FORMAT, "version": VERSION, "number": self.number, **content}
        write_file(self.path, MANIFEST, [(WHOLE_HASH, sealed(json.dumps(manifest, indent=1).encode()))])
        read_manifest(self.path)  # it raises: a checkpoint that cannot be loaded must not be put in place
        sync_folder(self.path)
        place = os.path.join(self.folder, self.name)
        os.rename(self.path, place)
        sync_folder(self.folder)
        return place

    def remove_older(self, keep: int) -> None:
        """Remove the oldest checkpoints of the run, so that ``keep`` are left."""
        for _, path in _numbered_checkpoints(self.folder)[0][:-keep]:
            # First the name, so that nobody takes what is left of it for a checkpoint.
            gone = os.path.join(self.folder, f"{_REMOVED}{secrets.token_hex(4)}")
            os.rename(path, gone)
            shutil.rmtree(gone)

    def end(self) -> None:
        """Remove what was not put in place, and let others save."""
        if self._lock is not None:
            try:
                if os.path.isdir(self.path):
                    shutil.rmtree(self.path, ignore_errors=True)
            finally:
                self._unlock()

    def _remove_left_over(self) -> None:
        """Remove the folders that killed processes left. Nobody else writes, as this process has the lock."""
        for name in os.listdir(self.folder):
            if name.startswith((_SAVING, _REMOVED)):
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def _locked(folder: str) -> FileIO:
    file = open_unbuffered(os.path.join(folder, _LOCK), "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CheckpointError(
            f"another driver or another process is saving to {folder} now; give each run a folder of its own"
        ) from None
    except OSError:  # a file system without locks: then nobody looks
        pass
    return file
