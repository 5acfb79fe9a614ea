"""What the operating system says of a process of this host that gives no sign of itself: its Python may not be let to run.

    it computes, swaps, reads or writes     it makes progress, and is not lost
    it is stopped, it waits                 it makes none

Where its Python is, a handler of a signal writes into memory that the asking process reads. It runs without Python's lock.
"""

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pippy.drivers.base.process import stat_of

_TICKS = os.sysconf("SC_CLK_TCK")
_COMPUTES = 0.05  # of a processor: threads that wait for Python's lock take less
_SWAPS = 20  # pages a second
_STACK, _SIGNAL = "pippy-stack", signal.SIGRTMAX - 1
_kept: list[int] = []


@dataclass(frozen=True)
class Sign:
    """What a process had done at a time: processor time, pages that were read back, bytes that were read and written.

    >>> sign = Sign.of(os.getpid())
    >>> sign.state, sign.moved_since(Sign(sign.time - 1, "R", sign.computed - 0.5, sign.pages, sign.bytes))
    ('R', 'computes')
    """

    time: float
    state: str
    computed: float
    pages: int
    bytes: int

    @classmethod
    def of(cls, pid: int) -> "Sign | None":
        """That of a process now; None if the system does not say."""
        fields = stat_of(pid)
        if not fields:
            return None
        copied = 0
        with suppress(OSError, ValueError):
            copied = sum(map(int, re.findall(r"^[rw]char: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.M)))
        return cls(time.monotonic(), fields[0], (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[9]), copied)

    def moved_since(self, before: "Sign") -> str:
        """What it did since then, in a word; nothing if it made no progress."""
        seconds = max(self.time - before.time, 1e-3)
        if self.state in "Tt":
            return ""
        if self.pages - before.pages > _SWAPS * seconds:
            return "swaps"
        if self.computed - before.computed > max(_COMPUTES * seconds, 1.5 / _TICKS):  # one tick may be of those threads
            return "computes"
        return "reads or writes" if self.bytes != before.bytes else ""


@dataclass(frozen=True)
class Look:
    """What a process had done ``before`` and ``now``, a tenth of a second later; and where its Python is: file, line, function.

    >>> look = Look.at(os.getpid())
    >>> Look.of_message(look.message()) == look
    True
    """

    before: Sign | None
    now: Sign | None
    lines: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def at(cls, pid: int) -> "Look":
        """Look at a process."""
        before = Sign.of(pid)
        time.sleep(0.1)
        now = Sign.of(pid)
        return cls(before, now, () if now is None or now.state in "TtZX" else tuple(_lines_of(pid)))

    @classmethod
    def briefly(cls, pid: int) -> "Look":
        """Look at what it has done until now alone."""
        return cls(None, Sign.of(pid))

    def message(self) -> dict[str, Any]:
        """What JSON can say."""
        return asdict(self)

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "Look":
        """The inverse of `message`."""
        before, now = (None if each is None else Sign(**each) for each in (message["before"], message["now"]))
        return cls(before, now, tuple((file, line, name) for file, line, name in message["lines"]))

    def innermost(self) -> str:
        """The innermost line of the user's code, or of any; nothing if the process does not say."""
        from pippy.ir.base.source import is_users  # it imports torch

        users = [each for each in self.lines if is_users(each[0])]
        return next((f"{file}:{line}, in {name}" for file, line, name in users or self.lines), "")


def said_of(look: Look, pid: int, silent: float) -> str:
    """What is said of a process that has given no sign of itself for so many seconds."""
    before, now = look.before, look.now
    if before is None or now is None or now.state in "ZX":
        return "its process has ended"
    if now.state in "Tt":
        return f"its process is stopped; kill -CONT {pid} lets it go on"
    place = f" in {line}" if (line := look.innermost()) else ""
    did = now.moved_since(before)
    if did == "swaps":
        return f"it swaps since {silent:.0f} s{place}: its host has too little memory"
    if did:
        return f"it is busy since {silent:.0f} s{place}: it {did}, and does not let Python run"
    return f"it waits since {silent:.0f} s{place}, and does not let Python run"


def show_stack_when_asked() -> None:
    """From now on another process of this host can see where the main thread of this one is, in Python's code."""
    if threading.current_thread() is threading.main_thread() and not _kept:
        with suppress(OSError, RuntimeError, AttributeError):
            _kept.append(os.memfd_create(_STACK))
            faulthandler.register(_SIGNAL, file=_kept[0], all_threads=False)


def _lines_of(pid: int) -> list[tuple[str, str, str]]:
    """Where the main thread of a process is, the innermost function first; nothing if it does not say."""
    with suppress(OSError):
        stack = next(
            (each for each in Path(f"/proc/{pid}/fd").iterdir() if f"memfd:{_STACK}" in os.readlink(each)), None
        )
        if stack is not None:
            begin = stack.stat().st_size
            os.kill(pid, _SIGNAL)
            end = time.monotonic() + 0.2
            while not (lines := _lines(stack, begin)) and time.monotonic() < end:
                time.sleep(0.01)
            return lines
    return []


def _lines(stack: Path, begin: int) -> list[tuple[str, str, str]]:
    with stack.open("rb") as file:
        file.seek(begin)
        return re.findall(r'File "(.*)", line (\d+) in (\S+)', file.read().decode(errors="replace"))
