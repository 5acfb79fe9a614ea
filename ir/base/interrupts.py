"""Ctrl-C while fake tensors are at work, where torch and Python would drop it, or end the process."""

import _thread
import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch._library import simple_registry
from torch._subclasses import fake_tensor
from torch.utils import _python_dispatch

# What Python calls when an object ends, beside `__del__` and what gc.callbacks has: it prints what these raise, and goes on.
_CALLED_AT_AN_END = (
    "WeakKeyDictionary.__init__.<locals>.remove",
    "WeakValueDictionary.__init__.<locals>.remove",
    "WeakIdKeyDictionary.__init__.<locals>.remove",
    "WeakSet.__init__.<locals>._remove",
    "finalize.__call__",
    "LiveStorages._count.<locals>.forget",
)
# Torch's own code that would be left with a mode in force or without one, or by an exception that ends the process.
_WITH_STATE = (simple_registry.__file__, fake_tensor.__file__, _python_dispatch.__file__)
_SOON = 0.001  # seconds
_UNHEARD = 0.05  # seconds


@contextmanager
def heard() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt wherever it comes. If it was dropped nevertheless, it raises at the end.

    In three places an exception does harm: while torch reads the device of a fake tensor, it ends the process; while an object
    is deleted, Python drops it; while torch changes its modes, they stay wrong. There Ctrl-C is sent again a millisecond
    later. It is sent again, too, if Python has dropped it.

    >>> with heard():
    ...     print("can be interrupted")
    can be interrupted
    """
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(before):
        yield
        return
    came, late = False, False
    over = False
    hook = _Unraisable()

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal came, late
        _heard.note()
        if over:  # the handler of before is put back first
            late = True
        elif _is_dropped(frame):
            _come_again()
        else:
            came = True
            before(number, frame)

    try:
        signal.signal(signal.SIGINT, hear)
        sys.unraisablehook = hook
        yield
    finally:
        over = True
        owed = _heard.owed()
        signal.signal(signal.SIGINT, before)
        if sys.unraisablehook is hook:
            sys.unraisablehook = hook.before
        if late or owed:
            before(signal.SIGINT, None)
    if came:
        before(signal.SIGINT, None)


def _is_dropped(frame: FrameType | None) -> bool:
    """Whether an exception would be dropped, or do harm, in this frame."""
    if (
        frame is not None and frame.f_code.co_qualname == "count.<locals>.wrapper"
    ):  # before a fake tensor's own function
        return True
    collecting = {getattr(each, "__code__", None) for each in gc.callbacks}
    while frame is not None:
        name = frame.f_code.co_name
        if name == "__del__" or frame.f_code.co_qualname in _CALLED_AT_AN_END or frame.f_code in collecting:
            return True
        if frame.f_code.co_filename in _WITH_STATE:
            return True
        if name == "__torch_dispatch__" and frame.f_locals.get("func") is torch.ops.prim.device.default:
            return True
        frame = frame.f_back
    return False


class _Unraisable:
    """The hook for exceptions that Python drops: it sends Ctrl-C again. Objects of any library may drop one at their end."""

    def __init__(self) -> None:
        self.before = sys.unraisablehook

    def __call__(self, dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt) and not sys.is_finalizing():
            _come_again()
        else:
            self.before(dropped)


def come_again() -> None:
    """Send Ctrl-C again, a millisecond later, or later if it would be dropped. Only the main thread calls this.

    The hook for dropped exceptions stays, as nothing tells when Ctrl-C was raised in the end.

    >>> try:
    ...     come_again()
    ...     time.sleep(0.1)
    ... except KeyboardInterrupt:
    ...     print("is heard")
    is heard
    """
    before = signal.getsignal(signal.SIGINT)

    def hear(number: int, frame: FrameType | None) -> None:
        _heard.note()
        if _is_dropped(frame):
            return _come_again()
        if signal.getsignal(signal.SIGINT) is hear:
            signal.signal(signal.SIGINT, before)
        if callable(before):
            before(number, frame)
        return None

    signal.signal(signal.SIGINT, hear)
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable()
    _come_again()


def _come_again() -> None:
    _thread.start_new_thread(_interrupt_soon, (_heard.owe(),))


def _interrupt_soon(heard_before: int) -> None:
    time.sleep(_SOON)
    while _heard.send_unless(heard_before):
        time.sleep(_UNHEARD)


class _Heard:
    """How often the handlers of this module were called.

    Python notes a signal, and calls the handler later. If the main thread begins to sleep in between, it does not wake up. So
    the signal is sent again until the handler is called, and not after that, as it would be a second Ctrl-C. A busy machine
    may send it late; a block that ends before that raises at the end what it is owed.
    """

    def __init__(self) -> None:
        self.times, self._owes = 0, False
        self._turn = threading.RLock()  # the handler may interrupt itself

    def note(self) -> None:
        """Note that a handler was called."""
        with self._turn:
            self.times, self._owes = self.times + 1, False

    def owe(self) -> int:
        """Note that Ctrl-C was dropped, and is to come again. Returns how often it was heard until now."""
        with self._turn:
            self._owes = True
            return self.times

    def owed(self) -> bool:
        """Whether Ctrl-C is to come again. It is not sent after that."""
        with self._turn:
            owes = self._owes
            if owes:
                self.note()
            return owes

    def send_unless(self, times: int) -> bool:
        """Send Ctrl-C if no handler was called since ``times`` calls. Returns whether to try again."""
        with self._turn:
            main, handler = threading.main_thread().ident, signal.getsignal(signal.SIGINT)
            if self.times != times or main is None or not callable(handler):
                return False
            signal.pthread_kill(main, signal.SIGINT)  # interrupt_main would not end what the main thread waits in
            self._owes = getattr(handler, "__module__", None) == __name__
            return self._owes


_heard = _Heard()
