"""A process that dies at its n-th operation on files: from then on it does none, not even to clean up.

The files of pippy that write checkpoints see this module's `os` and `shutil` in place of Python's. A write that is the last
operation is done in half.
"""

import os
import shutil
import threading
from contextlib import contextmanager

from pippy.drivers.files import contents, safetensors_files, synced_files
from pippy.drivers.model.state import saving

MODULES = [saving, contents, safetensors_files, synced_files]


class Killed(BaseException):
    """The process is gone."""


class MortalOs:
    """Python's `os`, whose operations on files are counted. ``lives`` is how many it does before it dies; None for all."""

    changing = ("open", "write", "fsync", "mkdir", "makedirs", "rename", "unlink", "rmdir", "close")

    def __init__(self, lives=None):
        self.lives, self.done, self.opened = lives, [], set()

    def __getattr__(self, name):
        found = getattr(os, name)
        if name not in self.changing:
            return found

        def counted(*args, **kwargs):
            if self.lives is not None and len(self.done) >= self.lives:
                if name == "write" and len(self.done) == self.lives:
                    os.write(args[0], args[1][: len(args[1]) // 2])
                self.done.append("killed")
                raise Killed
            self.done.append(name)
            result = found(*args, **kwargs)
            if name == "open" and args[1] & os.O_DIRECTORY:  # a file is closed by its object
                self.opened.add(result)
            elif name == "close":
                self.opened.discard(args[0])
            return result

        return counted

    def rmtree(self, path, ignore_errors=False):
        """`shutil.rmtree`, file by file."""
        for entry in sorted(os.scandir(path), key=lambda each: each.name):
            self.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else self.unlink(entry.path)
        self.rmdir(path)

    def end(self):
        """What the kernel does for a process that is gone: close its folders."""
        for file in self.opened:
            os.close(file)


class MortalShutil:
    def __init__(self, mortal):
        self.rmtree = mortal.rmtree

    copytree = staticmethod(shutil.copytree)


@contextmanager
def mortal(monkeypatch, lives=None):
    """Inside, the process dies after so many operations; gives what has been done."""
    its = MortalOs(lives)
    with monkeypatch.context() as patch:
        for module in MODULES:
            for name, stand_in in (("os", its), ("shutil", MortalShutil(its))):
                if hasattr(module, name):
                    patch.setattr(module, name, stand_in)
        try:
            yield its
        finally:
            for thread in threading.enumerate():
                if thread.name in ("pippy checkpoint", "pippy save"):
                    thread.join()  # or it would go on with Python's `os`, on files that others have opened since
            its.end()
