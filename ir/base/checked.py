"""Checks of arguments that every layer has: whole numbers, True or False, amounts. An error says what the argument is for."""

from math import inf
from typing import Any, TypeGuard

from pippy.ir.base.errors import PippyError
from pippy.ir.base.trees import describe


def is_whole(value: Any, least: int = 1) -> TypeGuard[int]:
    """Whether this is a whole number, not less than the least.

    >>> is_whole(3), is_whole(True), is_whole(0), is_whole(2.0)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(name: str, value: Any, what: str, error: type[PippyError], *, least: int = 1, none: str = "") -> None:
    """Raise unless this is a whole number. ``none`` says what None stands for, where it may be given.

    >>> check_count("keep", None, "how many to keep", PippyError, none="for all")
    >>> check_count("keep", 0, "how many to keep", PippyError, none="for all")
    Traceback (most recent call last):
    pippy.ir.base.errors.PippyError: keep=0: give how many to keep, 1 or more, or None for all
    """
    if not is_whole(value, least) and not (none and value is None):
        raise error(f"{name}={describe(value)}: give {what}, {least} or more{none and f', or None {none}'}")


def check_flag(name: str, value: Any, error: type[PippyError], *, true: str = "", false: str = "") -> None:
    """Raise unless this is True or False. ``true`` and ``false`` say what they stand for.

    >>> check_flag("strict", "no", PippyError, true="to have every name")
    Traceback (most recent call last):
    pippy.ir.base.errors.PippyError: strict='no': give True to have every name, or False
    """
    if not isinstance(value, bool):
        words = f"True{true and f' {true},'} or False{false and f' {false}'}"
        raise error(f"{name}={describe(value)}: give {words}")


def check_amount(
    name: str, value: Any, what: str, error: type[PippyError], *, most: float = inf, zero: bool = False, none: str = ""
) -> None:
    """Raise unless this is a number above 0, or 0 if ``zero`` may be given, and not above the ``most``.

    >>> check_amount("timeout", -1, "how many seconds to wait", PippyError)
    Traceback (most recent call last):
    pippy.ir.base.errors.PippyError: timeout=-1: give how many seconds to wait, more than 0
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and (value > 0 or (zero and value == 0)) and value <= most) and not (none and value is None):
        bounds = "more than 0" if most == inf else f"from 0 to {most:g}"
        raise error(f"{name}={describe(value)}: give {what}, {bounds}{none and f', or None {none}'}")
