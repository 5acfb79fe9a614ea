"""The progress of a measurement, on one line of stderr: on a terminal, or where the user asks for it."""

import sys
from typing import TextIO

from pippy.ir.base.terminals import is_muted, redraws

_LONGEST = 70


class ProfileProgress:
    """Counts steps. A terminal shows one line that changes; a file gets a line for each tenth of the steps.

    >>> progress = ProfileProgress(2, shown=True, stream=sys.stdout)
    >>> progress.step("0")
    profiling 1/2: 0
    >>> progress.step("1")
    profiling 2/2: 1
    >>> progress.end()
    """

    def __init__(self, steps: int, shown: bool | None = None, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        terminal = redraws(self.stream)
        self.steps, self.done, self.terminal = steps, 0, terminal
        self.shown = (terminal if shown is None else shown and self.stream is not None) and not is_muted()

    def step(self, name: str) -> None:
        """The step ``name`` begins."""
        self.done += 1
        if not self.shown:
            return
        text = f"profiling {self.done}/{self.steps}: {name}"[:_LONGEST]
        if self.terminal:
            self.stream.write(f"\r{text}\x1b[K")
        elif self.done * 10 // self.steps > (self.done - 1) * 10 // self.steps:
            self.stream.write(f"{text}\n")
        self.stream.flush()

    def end(self) -> None:
        """Clear the line."""
        if self.shown and self.terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
