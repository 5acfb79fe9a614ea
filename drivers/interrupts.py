"""Ctrl-C in the middle of something that must not be left half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_inside = False  # whether the main thread is in such a block: changing a handler takes longer than most blocks


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block. Half a command would leave workers waiting for ever for the other half.

    >>> with uninterrupted():
    ...     print("from here to there")
    from here to there
    """
    global _inside
    own = threading.current_thread() is threading.main_thread() and not _inside
    before = signal.getsignal(signal.SIGINT) if own else None
    if not callable(before):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *what: came.append(what))
    _inside = True
    try:
        yield
    finally:
        _inside = False
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


@contextmanager
def first_waits() -> Iterator[None]:
    """The first Ctrl-C waits for the end of the block, as in `uninterrupted`; a second one does not.

    >>> with first_waits():
    ...     print("from here to there, if nobody insists")
    from here to there, if nobody insists
    """
    own = threading.current_thread() is threading.main_thread() and not _inside
    before = signal.getsignal(signal.SIGINT) if own else None
    if not callable(before):
        yield
        return
    came: list[Any] = []

    def first(*what: Any) -> None:
        came.append(what)
        if len(came) > 1:
            before(*what)

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(came) == 1:
            before(*came[0])
