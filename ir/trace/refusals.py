"""The errors that tracing has raised inside of forward. A forward may catch one and take another branch: it is raised again."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from pippy.ir.base import source

_Error = TypeVar("_Error", bound=Exception)
_seen: ContextVar[list[Exception] | None] = ContextVar("refusals", default=None)


def refused(error: _Error) -> _Error:
    """``error``, which is to be raised, and which ends the trace even if forward catches it."""
    seen = _seen.get()
    if seen is not None:
        seen.append(error)
        error.source = source.of_frame(sys._getframe(1))  # type: ignore[attr-defined]
    return error


@contextmanager
def raising_refusals() -> Iterator[None]:
    """A context at whose end the first error that was caught inside is raised."""
    seen: list[Exception] = []
    token = _seen.set(seen)
    try:
        yield
    finally:
        _seen.reset(token)
    if seen:
        raise seen[0]


@contextmanager
def forgiving() -> Iterator["Forgiving"]:
    """A context that knows which refusals were raised inside, also if forward caught them, and can take them back."""
    seen = _seen.get()
    yield Forgiving([] if seen is None else seen)


class Forgiving:
    """The refusals of a region."""

    def __init__(self, seen: list[Exception]) -> None:
        self._seen, self._before = seen, len(seen)

    def raise_caught(self) -> None:
        """Raise the first refusal of the region, which forward has caught."""
        if len(self._seen) > self._before:
            raise self._seen[self._before]

    def forgive(self) -> None:
        """Let the trace go on, as if nothing in the region had been refused."""
        del self._seen[self._before :]
