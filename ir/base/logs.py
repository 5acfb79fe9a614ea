"""What pippy writes by the way: the records of its logger, and bars of progress.

The loggers of all files pass their records to the logger ``pippy``, whose level PIPPY_LOG sets. As a library, pippy leaves it
to the script what becomes of records. But where PIPPY_LOG is set and the script has no handler, they are written to standard
error. Bars follow the conventions of tqdm.
"""

import logging
import os
import sys
from typing import Any, TextIO

from pippy.ir.base.errors import PippyError

LOGGER = logging.getLogger("pippy")
_LEVELS = ("debug", "info", "warning", "error", "critical")


class ForScriptsWithout(logging.StreamHandler[Any]):
    """Writes the records of pippy to standard error, if nothing else is there that takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_other(record.name) and sys.stderr is not None:
            self.stream = sys.stderr  # as it is now
            super().emit(record)

    def _has_other(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(each is not self and not isinstance(each, logging.NullHandler) for each in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def set_up_logging() -> None:
    """Do what a library does for its logger, and what PIPPY_LOG says. Raises if that is no level."""
    LOGGER.addHandler(logging.NullHandler())
    level = os.environ.get("PIPPY_LOG", "")
    if not level:
        return
    if level.lower() not in _LEVELS:
        raise PippyError(f"PIPPY_LOG={level}: give one of {', '.join(_LEVELS)}, or unset it")
    LOGGER.setLevel(level.upper())
    LOGGER.addHandler(ForScriptsWithout())


def is_muted() -> bool:
    """Whether the user wants no progress at all: TQDM_DISABLE is set."""
    return bool(os.environ.get("TQDM_DISABLE"))


def redraws(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that can write a line anew.

    >>> redraws(None)
    False
    """
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
