"""What a trace has learnt of forward by trying, for the next trace of it.

A trace cannot know whether `bool(x)` of a tensor is an assertion's or an `if`'s. So it tries the answers:

    False leads to an AssertionError       assert x                     recorded, and True from now on
    True leads to one                      assert not x                 recorded, and False from now on
    True leads to an error at once         if x: raise ValueError       the same as `assert not x`
    neither                                if x:                        refused

After an answer forward may make a few operations, for a message. If it does more, it was no assertion.

The hooks of modules that are called as a whole, those of torch.nn among them, are not called by a trace. One may keep what it
is given in a dict that forward reads; then forward fails, or finds what another call has left. So a trace that fails, or
meets tensors from outside, is tried once more with these modules traced through, and their hooks. It counts if it works.

Sizes are not hashable at first, since a cache of functools would keep them (einops then goes on without its cache). If forward
cannot do without, they are, and are checked in each call.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch import fx

from pippy.ir.base.node_notes import SOURCE
from pippy.ir.trace.tracing_thread import replaced

_Place = tuple[CodeType, int, int]  # a function, a line, and which `bool(x)` of those of the line, one after the other
_Found = TypeVar("_Found")
_RAISED = (AssertionError, ValueError, RuntimeError)
_MESSAGE = 20  # operations, as f"{x.shape} has {x.isnan().sum()}"


class UnhashableError(TypeError):
    """Raised where a size is used as a key."""


class StaleError(Exception):
    """Raised after a trace that has met tensors from outside, which hooks may have left."""


class TrialOverError(Exception):
    """Raised where forward goes on after an answer that was tried."""


@dataclass
class Trial:
    """An answer that is tried."""

    place: _Place
    answer: bool
    frame: FrameType
    operations: int = 0


@dataclass
class TraceTrials:
    """What is known: of places with `bool(x)`, the answer that an assertion asks for, or None if it is none."""

    known: dict[_Place, bool | None] = field(default_factory=dict)
    error: str = "AssertionError"  # of the place whose answer was asked for last
    hashes_sizes: bool = False
    follows_hooks: bool | None = None  # None: that was not tried
    has_hooks: bool = False
    now: Trial | None = None
    _from_outside: int = 0  # tensors, without following hooks
    _errors: dict[_Place, str] = field(default_factory=dict)
    _untried: bool = False  # the answer to try next at a new place
    _line: int | None = None  # of the last `bool(x)`, until an operation of another line comes
    _number: int = 0

    def answer(self, frame: FrameType) -> bool | None:
        """The answer to `bool(x)` in a frame; None if it is to be refused."""
        if self.now is not None:
            raise TrialOverError
        self._number = self._number + 1 if self._line == frame.f_lineno else 0
        self._line = frame.f_lineno
        place = frame.f_code, frame.f_lineno, self._number
        if place not in self.known:
            self.now = Trial(place, self._untried, frame)
            return self._untried
        self.error = self._errors.get(place, "AssertionError")
        return self.known[place]

    def check_stale(self, from_outside: int) -> None:
        """Raise if the trace that has met so many tensors from outside is to be made in another way."""
        if self.has_hooks and from_outside and self.follows_hooks is None:
            self._from_outside = from_outside
            raise StaleError
        if self.follows_hooks and 0 < self._from_outside <= from_outside:
            raise StaleError

    @property
    def is_trying(self) -> bool:
        return self.now is not None

    @contextmanager
    def ending_at_operations(self, tracer: fx.Tracer) -> Iterator[None]:
        """A context in which a trial ends if forward goes on, that is, if it calls a module or leaves the function."""
        create_node = tracer.create_node

        def create(kind: str, *args: Any, **kwargs: Any) -> fx.Node:
            if self.now is not None:
                self.now.operations += 1
                if kind == "call_module" or self.now.operations > _MESSAGE or not _is_running(self.now.frame):
                    raise TrialOverError
            node = create_node(kind, *args, **kwargs)
            where = SOURCE.of(node)
            if where is not None and where.line != self._line:
                self._line = None
            return node

        self._line = None
        with replaced(tracer, "create_node", create):
            yield

    def until_known(self, trace: Callable[[], _Found], again: Callable[[], None]) -> _Found:
        """What ``trace`` gives once nothing more is to be tried. ``again`` runs before each further trace."""
        while True:
            try:
                result = trace()
                if self.now is None:
                    return result
                self._learn(None)
            except Exception as error:
                if not self._learn(error):
                    raise
            again()

    def _learn(self, error: Exception | None) -> bool:
        """Take note of how a trace has ended. Gives whether there is something new."""
        trial, self.now = self.now, None
        causes = error, None if error is None else error.__cause__
        if trial is None:
            if not self.hashes_sizes and any(isinstance(each, UnhashableError) for each in causes):
                self.hashes_sizes = True
                return True
            if self.follows_hooks is False or not self.has_hooks:
                return False
            self.follows_hooks = self.follows_hooks is None
            return True
        failed = next((each for each in causes if _is_raised(each, trial.frame)), None)
        if failed is not None:
            self._errors[trial.place] = type(failed).__name__
            self.known[trial.place], self._untried = not trial.answer, False
        elif trial.answer:
            self.known[trial.place], self._untried = None, False
        else:
            self._untried = True
        return True


def _is_raised(error: BaseException | None, frame: FrameType) -> bool:
    """Whether an error is that of an assertion, or one that the function of ``frame`` raises itself."""
    if not isinstance(error, _RAISED) or isinstance(error, AssertionError):
        return isinstance(error, AssertionError)
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame is frame


def _is_running(frame: FrameType) -> bool:
    now: FrameType | None = sys._getframe(2)
    while now is not None and now is not frame:
        now = now.f_back
    return now is not None


def trials_of(tracer: fx.proxy.TracerBase) -> TraceTrials:
    """What is known for the trace that a tracer makes."""
    found: TraceTrials = tracer.__dict__.setdefault("_trials", TraceTrials())
    return found
