"""The user's source lines: the line of the model that a node, a frame or an exception comes from."""

import contextlib
import functools
import inspect
import os
import random
import sys
import warnings
from pathlib import Path
from types import FrameType, TracebackType
from unittest import mock

import torch
from torch import fx

from pippy.ir.base.errors import PippyWarning
from pippy.ir.base.node_notes import MODULE_PATH, SOURCE, SourceLine

_PIPPY = Path(__file__).parents[2]
_OWN = tuple(f"{folder}{os.sep}" for folder in (_PIPPY, (_PIPPY / "ir").resolve(), (_PIPPY / "drivers").resolve()))
_STANDARD = (contextlib.__file__, functools.__file__, mock.__file__, random.__file__)
_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", *_OWN)
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_INSTALLED = tuple(f"{_STANDARD_LIBRARY}{folder}{os.sep}" for folder in _PACKAGES)
TRACE = inspect.unwrap(fx.Tracer.trace).__code__  # torch._dynamo wraps it in a function that it wraps others in, too


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is the user's: not a file of torch or pippy, and not generated."""
    return not file.startswith((*_LIBRARIES, *_STANDARD, "<eval_with_key>", "<frozen"))


@functools.cache
def is_standard(file: str) -> bool:
    """Whether a file is one of Python's standard library."""
    return file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED)


@functools.cache
def is_of_project(file: str) -> bool:
    """Whether a file is the user's own: not one of an installed package, or of the standard library."""
    return (
        is_users(file)
        and not file.startswith(_STANDARD_LIBRARY)
        and not any(f"{os.sep}{each}{os.sep}" in file for each in _PACKAGES)
    )


def is_called_by_user(frame: FrameType | None) -> bool:
    """Whether a frame is the user's, or of the standard library and called by the user's. torch calls that one too."""
    while frame is not None and (
        is_standard(frame.f_code.co_filename) or frame.f_code.co_filename.startswith("<frozen")
    ):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def of_frame(frame: FrameType | None) -> SourceLine | None:
    """The user's innermost line, of the frames that tracing called."""
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            return SourceLine(code.co_filename, frame.f_lineno, code.co_name)
        if code is TRACE:
            return None
        frame = frame.f_back
    return None


def of_traceback(traceback: TracebackType | None, below: str) -> SourceLine | None:
    """The user's innermost line in a traceback, of the frames that the function named ``below`` called."""
    line, entered = None, False
    while traceback is not None:
        code = traceback.tb_frame.f_code
        entered = entered or (code.co_name == below and not is_users(code.co_filename))
        if entered and is_users(code.co_filename):
            line = SourceLine(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return line


def is_called_by_pippy() -> bool:
    """In a function that torch calls back: whether it was pippy that called torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    while frame.f_back is not None and not _is_own(frame.f_code.co_filename):
        if is_users(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return _is_own(frame.f_code.co_filename)


def _is_own(file: str) -> bool:
    return file.startswith(_OWN) and not file.endswith("without_dynamo.py")  # whose functions stand for torch's


def warn(message: str) -> None:
    """Issue a `PippyWarning` at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, PippyWarning, stacklevel=level + 1)


def excerpt_of(node: fx.Node) -> str:
    """A node's line for an error message; without a line, the node and its module."""
    source = SOURCE.of(node)
    if source is not None:
        return source.excerpt()
    module = MODULE_PATH.of(node)
    where = f" in module {module!r}" if module else ""
    return f"  {node.format_node()}{where}"
