"""Ctrl-C in the middle of something that must not be left half done."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pippy.ir.interrupts import come_again

# How many wait in the block in force, in the main thread. To change a handler takes longer than most blocks.
_wait = 0.0


def uninterrupted() -> AbstractContextManager[list[Any]]:
    """Ctrl-C waits for the end of the block. Half a command would leave workers waiting for ever for the other half.

    >>> with uninterrupted():
    ...     print("from here to there")
    from here to there
    """
    return _waiting(math.inf)


@contextmanager
def put_off() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, and comes a millisecond after it. For what runs when an object ends.

    Python prints what is raised there, and goes on.

    >>> with put_off():
    ...     print("from here to there")
    from here to there
    """
    try:
        with uninterrupted():
            yield
    except KeyboardInterrupt:
        come_again()


def first_waits() -> AbstractContextManager[list[Any]]:
    """The first Ctrl-C waits for the end of the block, as in `uninterrupted`; a second one does not.

    The block is given a list, which is empty until the first has come.

    >>> with first_waits() as came:
    ...     print("from here to there, if nobody insists", came)
    from here to there, if nobody insists []
    """
    return _waiting(1)


@contextmanager
def _waiting(at_most: float) -> Iterator[list[Any]]:
    """So many of Ctrl-C wait for the end of the block. Inside of a block where as many wait, this is nothing."""
    global _wait
    came: list[Any] = []
    outer = _wait
    own = threading.current_thread() is threading.main_thread() and at_most > outer
    before = signal.getsignal(signal.SIGINT) if own else None
    if not callable(before):
        yield came
        return

    def hear(*what: Any) -> None:
        came.append(what)
        if len(came) > at_most:
            before(*what)

    signal.signal(signal.SIGINT, hear)
    _wait = at_most
    try:
        yield came
    finally:
        _wait = outer
        signal.signal(signal.SIGINT, before)
        for what in came if len(came) <= at_most else ():
            before(*what)
