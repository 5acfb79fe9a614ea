"""Ctrl-C at each place in a function where Python may raise it: what of that leaves a file descriptor open, or is lost?"""

import dis
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

# Python looks for signals behind these instructions, and at no others.
_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")

Place = tuple[str, int, int]  # a function, a line and an instruction


def places(do: Callable[[], Any], files: tuple[str, ...]) -> list[Place]:
    """Where Ctrl-C may come while a function runs, in these files, each place once."""
    found: dict[Place, None] = {}
    for _ in range(2):  # on Python 3.12 and 3.13 the first time may only prepare what is asked of f_trace_opcodes
        with _traced(files, lambda place: found.setdefault(place)):
            do()
    return list(found)


def lost(
    do: Callable[[], Any],
    files: tuple[str, ...],
    place: Place,
    number: int = signal.SIGINT,
    raised: type[BaseException] = KeyboardInterrupt,
) -> bool:
    """Run a function with Ctrl-C at one place. True if that raised no KeyboardInterrupt, though the place was reached.

    Or with another signal, whose handler raises something else.
    """
    left = [place]

    def come(here: Place) -> None:
        if here in left:
            left.clear()
            signal.raise_signal(number)

    try:
        with _traced(files, come):
            do()
    except raised:
        return False
    return not left


def leaks(do: Callable[[], Any], *files: str, after: Callable[[], Any] = lambda: None) -> list[tuple[Place, str]]:
    """The places where Ctrl-C is lost or leaves a descriptor open, in the files whose names end like this; and what is left.

    ``after`` is called after each.
    """
    wrong, found = [], places(do, files)
    assert found, "no place in these files was reached"
    for place in found:
        before = descriptors()
        dropped = lost(do, files, place)
        after()
        if len(descriptors()) > len(before):
            gc.collect()
        new = [what for number, what in descriptors().items() if number not in before]
        if new or dropped:
            wrong.append((place, "no KeyboardInterrupt" if dropped else ", ".join(new)))
    return wrong


@contextmanager
def _traced(files: tuple[str, ...], reached: Callable[[Place], Any]) -> Iterator[None]:
    """Say which places are reached."""
    assert threading.current_thread() is threading.main_thread()

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines, looks = True, False, _behind(frame.f_code)

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode" and frame.f_lasti in looks:
                reached((frame.f_code.co_qualname, frame.f_lineno, frame.f_lasti))
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def _behind(code: CodeType) -> set[int]:
    """The instructions before which Python has looked for signals."""
    all_ = list(dis.get_instructions(code))
    return {each.offset for before, each in pairwise(all_) if before.opname.startswith(_LOOKS)}


def descriptors() -> dict[int, str]:
    """What this process has open."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(FileNotFoundError):  # the one by which they are listed
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found
