"""The errors of schedules and programs. Each message shows what was given and what to do."""


class ScheduleError(Exception):
    """The base of every error that ``pippy.drivers.plan`` raises on purpose.

    >>> issubclass(ParseError, ScheduleError)
    True
    """


class ArgumentError(ScheduleError, ValueError):
    """A size, a cost or an option that cannot work."""


def beginning(value: object) -> str:
    """The ``repr`` of a value in one line, or its beginning.

    >>> beginning("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    try:
        shown = " ".join(repr(value).split())
    except Exception:  # a number of more than 4300 digits has none
        shown = object.__repr__(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def require(what: str, value: object, kind: type, hint: str) -> None:
    """Refuse a value that is not of a kind, before anything inside trips over it.

    >>> require("name", 3, str, "give the name of a schedule")
    Traceback (most recent call last):
    pippy.drivers.plan.language.errors.ArgumentError: name=3 is a int; give the name of a schedule
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{what}={beginning(value)} is a {type(value).__name__}; {hint}")


class PlacementError(ArgumentError):
    """A placement that leaves a stage or a worker empty, or that a schedule cannot use."""


class UnknownScheduleError(ScheduleError, LookupError):
    """A name that the registry does not have."""


class ParseError(ScheduleError, ValueError):
    """Text that is no instruction or program. ``line`` and ``column`` count from 1.

    >>> raise ParseError("expected a stage number", line=3, column=2)
    Traceback (most recent call last):
    pippy.drivers.plan.language.errors.ParseError: line 3, column 2: expected a stage number
    """

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column


class ProgramError(ScheduleError):
    """A program that cannot run. ``faults`` lists everything that is wrong with it, one line each."""

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults
