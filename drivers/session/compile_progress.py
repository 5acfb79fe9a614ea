"""The progress of compiling on the workers, on one line of a terminal."""

import sys
from collections.abc import Sequence
from typing import TextIO

from pippy.ir.base.logs import is_muted, redraws

_LONGEST = 78


class CompileProgress:
    """Shows how many pieces of stages workers have compiled, while calls wait for them. It writes to a terminal only.

    >>> progress = CompileProgress(["worker0", "worker1"])
    >>> progress.line({0: (1, 3), 1: (0, 2)})
    'compiling: worker0 1/3, worker1 0/2'
    """

    def __init__(self, names: Sequence[str], stream: TextIO | None = None) -> None:
        self.names, self.stream = names, stream
        # of each worker that compiles: how many pieces are done, and how many there are
        self.now: dict[int, tuple[int, int]] = {}
        self.shown = False

    def show(self, worker: int, progress: tuple[int, int] | None) -> None:
        """Show what a worker has told: None if it does not compile."""
        if progress is not None:
            self.now[worker] = progress
        elif self.now.pop(worker, None) is None:
            return
        if self.now:
            self._write()
        else:
            self.end()

    def _write(self) -> None:
        stream = self.stream or sys.stderr
        if redraws(stream) and not is_muted():
            self.shown = True
            stream.write(f"\r{self.line(self.now)}\x1b[K")
            stream.flush()

    def line(self, now: dict[int, tuple[int, int]]) -> str:
        """What is shown."""
        each = ", ".join(f"{self.names[worker]} {done}/{of}" for worker, (done, of) in sorted(now.items()))
        return f"compiling: {each}"[:_LONGEST]

    def end(self) -> None:
        """The call waits no longer: clear the line."""
        if self.shown:
            self.shown = False
            stream = self.stream or sys.stderr
            stream.write("\r\x1b[K")
            stream.flush()
