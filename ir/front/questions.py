"""Refuses what forward asks of a traced value where Python asks no proxy, and the answer would be that for another object.

    x is True, x is a_sentinel      always False of a proxy
    x.dtype is torch.float32        the same
    type(x), callable(x)            the class of the proxy; True
    match x: case [a, b]:           no proxy is a sequence or a mapping

Python's trace function tells of each instruction of the user's functions that hold such a question, before it runs. It is seen
where `x` is a local variable, and `type` or `callable` a name for that function. `x is None` is no question of this kind: the
graph is compared with one that was traced without the input (`trace.py`).
"""

import dis
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx

from pippy.ir import source
from pippy.ir.errors import TracingError
from pippy.ir.front.c_calls import paused_for_nodes
from pippy.ir.front.classes import answer_in, answering_classes
from pippy.ir.front.none_questions import check, compared_variables, is_call_compared, may_be_none
from pippy.ir.front.refusals import refused
from pippy.ir.front.replaced import replaced
from pippy.ir.front.tracing_thread import patched_here
from pippy.ir.front.values import UNKNOWN, value_of
from pippy.ir.run import repeated_forward

_ADVICE = (
    "What to do: if it is an argument, pass it as a constant with concrete_args={...}; or ask with isinstance(x, torch.Tensor)"
    "; or move this code into a module of its own and keep it whole with a tracer whose is_leaf_module says True for it"
)
_ABOUT_CLASSES = (type, callable)
_NAMES = frozenset(("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME", "LOAD_FAST_CHECK"))
_OTHERS = _NAMES | {"LOAD_GLOBAL", "LOAD_CONST", "LOAD_ATTR"}


_MODES = frozenset((torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled))


def check_not_asked_for_mode(function: Any, frame: FrameType) -> None:
    """Raise if the user's code asks for a mode of torch that another call of the Pipe may have."""
    if function in _MODES and source.is_users(frame.f_code.co_filename) and torch.is_grad_enabled():
        raise asked(
            f"forward() calls torch.{function.__name__}(), which tracing would answer once for every run", frame
        )


@contextmanager
def refusing_to_say_what_runs() -> Iterator[None]:
    """A context in which `is_checkpointing` and `is_recomputing` raise a `TracingError`."""

    def refuse(what: str) -> bool:
        raise asked(
            f"forward() calls pippy.is_{what}(), which tracing would answer once for every run", sys._getframe(1)
        )

    with patched_here(repeated_forward, "is_now", refuse):
        yield


@contextmanager
def watching_questions(tracer: fx.Tracer) -> Iterator[None]:
    """A context in which a question of the table above raises a `TracingError`. Under a debugger it does not."""
    if sys.gettrace() is not None:
        yield
        return
    watch = Watch(tracer)
    sys.settrace(watch.on_call)
    try:
        with (
            answering_classes(_refusing),
            watch.for_none(),
            paused_for_nodes(tracer, lambda: sys.settrace(None), lambda: sys.settrace(watch.on_call)),
        ):
            yield
    finally:
        sys.settrace(None)


class Watch:
    """What Python calls for each call of a function, and for each instruction of one that holds a question.

    Questions for None count from the first value on that may be None, in the functions that are running too.
    """

    def __init__(self, tracer: fx.Tracer) -> None:
        self.tracer, self.counts_none = tracer, False

    @contextmanager
    def for_none(self) -> Iterator[None]:
        """A context in which each new value that may be None is noticed."""
        create_proxy = self.tracer.create_proxy

        def create(*args: Any, **kwargs: Any) -> Any:
            proxy = create_proxy(*args, **kwargs)
            if may_be_none(proxy.node, self.tracer.root) and value_of(proxy) is UNKNOWN:
                self._given(proxy, sys._getframe(1))
            return proxy

        with replaced(self.tracer, "create_proxy", create):
            yield

    def _given(self, proxy: Any, frame: FrameType | None) -> None:
        innermost, self.counts_none = True, True
        while frame is not None and frame.f_code is not source.TRACE:
            if source.is_users(frame.f_code.co_filename):
                if innermost and is_call_compared(frame):
                    check(proxy)
                innermost = False
                if frame.f_trace is None and compared_variables(frame.f_code):
                    self._watch(frame)
            frame = frame.f_back

    def _watch(self, frame: FrameType) -> None:
        frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = self.on_instruction, True, False

    def on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Watch the instructions of a function that holds a question."""
        code = frame.f_code
        if not source.is_users(code.co_filename):
            return None
        asks = _questions(code) or (self.counts_none and compared_variables(code))
        if not asks or not _is_called_by_user(frame):
            return None
        for _, other in _questions(code).values():
            if isinstance(other, _Called):
                answer_in(frame, other.name)
        self._watch(frame)
        return self.on_instruction

    def on_instruction(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Look at an instruction of a function that is watched."""
        if event == "opcode":
            self.answer(frame)
        return self.on_instruction

    def answer(self, frame: FrameType) -> None:
        """Raise if the frame's instruction begins a question that matters; have the answer checked if it is for None."""
        question = _questions(frame.f_code).get(frame.f_lasti)
        if question is not None:
            value, other = question
            if isinstance_of_proxy(frame.f_locals.get(value)) and _matters(frame, other):
                raise asked(
                    f"forward() asks what a traced value is ({_word(other)}), which tracing cannot answer", frame
                )
        compared = compared_variables(frame.f_code).get(frame.f_lasti) if self.counts_none else None
        proxy: Any = None if compared is None else frame.f_locals.get(compared)
        if isinstance_of_proxy(proxy) and may_be_none(proxy.node, self.tracer.root) and value_of(proxy) is UNKNOWN:
            check(proxy)


def _is_called_by_user(frame: FrameType | None) -> bool:
    """Whether a frame is the user's, or of the standard library and called by the user's. torch calls that one too."""
    while frame is not None and source.is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and source.is_users(frame.f_code.co_filename)


def _refusing(what: str) -> TracingError:
    return asked(f"forward() asks what a traced value is ({what}), which tracing cannot answer", sys._getframe(1))


def _matters(frame: FrameType, other: Any) -> bool:
    if isinstance(other, _Called):
        called = source.lookup(frame, other.name)
        return any(called is each for each in _ABOUT_CLASSES)
    if isinstance(other, _Local):
        compared = frame.f_locals.get(other.name)
        return not (compared is None or isinstance_of_proxy(compared))
    return True


class _Called(str):
    """The name of a function that a value is given to."""

    name = property(str)


class _Local(str):
    """The name of a local variable that a value is compared with."""

    name = property(str)


def _word(other: str) -> str:
    return f"{other}()" if isinstance(other, _Called) else "match" if other == "match" else "is"


def isinstance_of_proxy(value: Any) -> bool:
    """Whether a value is a proxy, whatever it says of its class."""
    return issubclass(type(value), fx.Proxy)


@functools.lru_cache(maxsize=4096)
def _questions(code: CodeType) -> dict[int, tuple[str, str]]:
    """The places of a function where it loads a local variable to ask for it: its name, and what it is asked."""
    steps = source.steps(code)
    matches = any(each.opname in ("MATCH_SEQUENCE", "MATCH_MAPPING") for each in steps) or any(
        [each.opname for each in steps[at : at + 3]] == ["COPY", "LOAD_CONST", "IS_OP"] for at in range(len(steps))
    )
    found = {}
    for at, step in enumerate(steps):
        if step.opname in _NAMES:
            other = _asked_of(steps, at, matches)
            if other is not None:
                found[step.offset] = (step.argval, other)
    return found


def _asked_of(steps: Sequence[dis.Instruction], at: int, matches: bool) -> str | None:
    before, after = steps[at - 1] if at else None, steps[at + 1] if at + 1 < len(steps) else steps[at]
    if after.opname == "CALL" and after.arg == 1 and before is not None and before.opname in (*_NAMES, "LOAD_GLOBAL"):
        return _Called(before.argval)
    if matches and (after.opname.startswith("MATCH_") or (after.opname == "COPY" and after.arg == 1)):
        return "match"
    return _compared_with(steps, at)


def _compared_with(steps: Sequence[dis.Instruction], at: int) -> str | None:
    """What the value that is loaded at ``at`` is compared with by `is`: empty for no local variable, None for nothing."""
    end = next((index for index in range(at + 1, len(steps)) if steps[index].opname not in _OTHERS), at)
    if steps[end].opname != "IS_OP":
        return None
    between = steps[at + 1 : end] if end > at + 1 else steps[at - 1 : at]  # x is other; other is x
    if steps[at + 1].opname == "LOAD_ATTR" or not between or between[0].opname not in _OTHERS:
        return None
    if between[0].opname == "LOAD_CONST" and between[0].argval is None:
        return None
    return _Local(between[0].argval) if len(between) == 1 and between[0].opname in _NAMES else ""


def keeps_keys(frame: FrameType) -> bool:
    """Whether the frame's instruction hashes a value to keep it: in a dict, in a set, or in a cache of functools."""
    at = next((each for each in source.instructions(frame.f_code) if each.offset == frame.f_lasti), None)
    if at is None or at.opname in ("BINARY_SUBSCR", "CONTAINS_OP"):
        return False
    if at.opname.startswith("CALL"):
        return isinstance(source.called(frame), functools._lru_cache_wrapper)
    return True


def is_compared(frame: FrameType) -> bool:
    """Whether what the frame's instruction gives, an attribute, is an operand of `is`, or is asked whether it is None."""
    if not source.is_users(frame.f_code.co_filename):
        return False
    steps = source.steps(frame.f_code)
    at = next((index for index, each in enumerate(steps) if each.offset == frame.f_lasti), None)
    if at is None or steps[at].opname != "LOAD_ATTR":
        return False
    at += 1
    if steps[at].opname.endswith(("_IF_NONE", "_IF_NOT_NONE")):
        return True
    while steps[at].opname in _OTHERS:
        at += 1
    return steps[at].opname == "IS_OP"


def asked(what: str, frame: FrameType | None) -> TracingError:
    """The error for a question on the user's line below ``frame``."""
    where = source.of_frame(frame)
    line = f":\n{where.excerpt()}\n" if where else "; "
    return refused(TracingError(f"{what}{line}{_ADVICE}"))
