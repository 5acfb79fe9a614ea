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
from contextlib import nullcontext, suppress
from io import FileIO
from typing import Any

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.synced_files import open_unbuffered, read_file, sync_folder, write_file

MANIFEST = "checkpoint.json"
FORMAT = "pippy checkpoint"
VERSION = 1
_SAVING, _REMOVED, _LOCK = ".saving-", ".removed-", ".lock"


def read_manifest(path: str) -> dict[str, Any] | None:
    """The content of `checkpoint.json` in this folder; None if the folder is no checkpoint of pippy's."""
    try:
        text = read_file(os.path.join(path, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        manifest = json.loads(text)
        known = manifest["format"] == FORMAT and isinstance(manifest["number"], int)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{os.path.join(path, MANIFEST)} cannot be read ({type(error).__name__}: {error}): the checkpoint is damaged; load "
            "another one by its own path"
        ) from error
    if not known:
        return None
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{path} was written by a newer pippy: it has version {manifest['version']} of the format, and this pippy "
            f"reads versions up to {VERSION}; update pippy"
        )
    return manifest


def checkpoints_in(folder: str) -> list[str]:
    """The paths of a run's checkpoints, the oldest first.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with NewCheckpoint(folder, step=10) as new:
    ...         path = new.put_in_place({})
    ...     path.removeprefix(folder), checkpoints_in(folder) == [path]
    ('/step-10', True)
    """
    return [path for _, path in sorted(_numbered_checkpoints(folder))]


def _numbered_checkpoints(folder: str, also_damaged: bool = True) -> list[tuple[int, str]]:
    checkpoints = []
    for entry in os.scandir(folder):
        if entry.is_dir() and not entry.name.startswith("."):
            with nullcontext() if also_damaged else suppress(CheckpointError):
                manifest = read_manifest(entry.path)
                if manifest is not None:
                    checkpoints.append((manifest["number"], entry.path))
    return checkpoints


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
            there = _numbered_checkpoints(folder, also_damaged=False)
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
        write_file(self.path, MANIFEST, [("all", json.dumps(manifest, indent=1).encode())])
        sync_folder(self.path)
        place = os.path.join(self.folder, self.name)
        os.rename(self.path, place)
        sync_folder(self.folder)
        return place

    def remove_older(self, keep: int) -> None:
        """Remove the oldest checkpoints of the run, so that ``keep`` are left."""
        for _, path in sorted(_numbered_checkpoints(self.folder, also_damaged=False))[:-keep]:
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
