"""A line of the user's code, by its file and number."""

import linecache
from dataclasses import dataclass


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code.

    >>> str(SourceLine("net.py", 3, "forward"))
    'net.py:3, in forward'
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"

    @property
    def code(self) -> str:
        """The text of the line; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def excerpt(self) -> str:
        """Two lines for an error message: the place and the code."""
        return f"  {self}" + (f"\n    {self.code}" if self.code else "")
