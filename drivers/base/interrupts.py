"""Ctrl-C in the middle of something that must not be left half done. So are other signals for which a script has a handler:
it may raise, as that of a job that is to end, of a time limit, or torch's when a process of a DataLoader has died.
"""

import _signal  # type: ignore[import-not-found] # `signal` is this, and makes enums of what goes in and out, at ten times the cost
import math
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pippy.ir.base.interrupts import come_again

_SIGNALS = tuple(
    int(each)
    for each in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGALRM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGCHLD,
        signal.SIGXCPU,
    )
)

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
    before = {number: handler for number in _SIGNALS if callable(handler := _signal.getsignal(number))} if own else {}
    if not before:
        yield came
        return
    passed: set[int] = set()
    over = False

    def hear(number: int, frame: Any) -> None:
        if over:  # what was heard before this handler was taken away has kept it from that
            _signal.signal(number, before[number])
        else:
            came.append((number, frame))
            if len(came) <= at_most:
                return
            passed.add(number)
        before[number](number, frame)

    try:
        for number in before:
            _signal.signal(number, hear)
        _wait = at_most
        yield came
    finally:
        _wait = outer
        over = True
        try:
            for number, handler in before.items():
                _signal.signal(number, handler)
        finally:
            _handle([each for each in came if each[0] not in passed], before)


def _handle(came: list[Any], handlers: Mapping[int, Any]) -> None:
    """Call the handlers of signals that came. If one raises, the others are called, too."""
    if came:
        try:
            handlers[came[0][0]](*came[0])
        finally:
            _handle(came[1:], handlers)
