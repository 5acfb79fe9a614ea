"""What Python shows of a pippy error that ends a script: the script's lines and the message, without pippy's own frames.

The error itself keeps its frames and its cause, for `except`, for debuggers and for `logging`. With PIPPY_TRACEBACK=full in the
environment, all of them are shown.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

LIBRARY = Path(__file__).parents[2]


def show_briefly(kind: type[BaseException]) -> None:
    """From now on, `sys.excepthook` gets errors of this kind in brief."""
    shown = sys.excepthook

    def show(each: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, kind):
            return shown(each, error, trace)
        with in_brief(error.with_traceback(trace)):
            return shown(each, error, error.__traceback__)

    sys.excepthook = show


@contextmanager
def in_brief(error: BaseException) -> Iterator[None]:
    """Inside, an error has only the frames that are shown, and no cause: its message says what was wrong."""
    if shows_all():
        yield
        return
    whole, cause, suppressed = error.__traceback__, error.__cause__, error.__suppress_context__
    error.__traceback__, error.__cause__, error.__suppress_context__ = whole and without_end(whole), None, True
    try:
        yield
    finally:
        error.__traceback__, error.__cause__, error.__suppress_context__ = whole, cause, suppressed


def shows_all() -> bool:
    """Whether all frames are shown."""
    return os.environ.get("PIPPY_TRACEBACK") == "full"


def without_end(trace: TracebackType) -> TracebackType:
    """A traceback up to its last frame that is not in pippy."""
    links = [trace]
    while (following := links[-1].tb_next) is not None:
        links.append(following)
    while len(links) > 1 and Path(links[-1].tb_frame.f_code.co_filename).is_relative_to(LIBRARY):
        links.pop()
    shortened = None
    for link in reversed(links):
        shortened = TracebackType(shortened, link.tb_frame, link.tb_lasti, link.tb_lineno)
    assert shortened is not None
    return shortened
