"""Ctrl-C in the middle of something that must not be left half done."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_inside = False  # whether the main thread is in a block where all wait: to change a handler takes longer than most


def uninterrupted() -> AbstractContextManager[None]:
    """Ctrl-C waits for the end of the block. Half a command would leave workers waiting for ever for the other half.

    >>> with uninterrupted():
    ...     print("from here to there")
    from here to there
    """
    return _waiting(math.inf)


def first_waits() -> AbstractContextManager[None]:
    """The first Ctrl-C waits for the end of the block, as in `uninterrupted`; a second one does not.

    >>> with first_waits():
    ...     print("from here to there, if nobody insists")
    from here to there, if nobody insists
    """
    return _waiting(1)


@contextmanager
def _waiting(at_most: float) -> Iterator[None]:
    """So many of Ctrl-C wait for the end of the block, where they come as one."""
    global _inside
    own = threading.current_thread() is threading.main_thread() and not _inside
    before = signal.getsignal(signal.SIGINT) if own else None
    if not callable(before):
        yield
        return
    came: list[Any] = []

    def hear(*what: Any) -> None:
        came.append(what)
        if len(came) > at_most:
            before(*what)

    signal.signal(signal.SIGINT, hear)
    _inside = at_most == math.inf
    try:
        yield
    finally:
        _inside = False
        signal.signal(signal.SIGINT, before)
        if 0 < len(came) <= at_most:
            before(*came[0])
