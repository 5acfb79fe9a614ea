"""`type(x)` and `callable(x)` of a traced value whose value is known, for functions that look these names up as globals.

Python asks no object for its answer to `type(x)`. So while a function of the user's that asks so is traced, its module has a
global of that name, which hides the builtin. Other threads get the builtin's answers from it too.
"""

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import fx

from pippy.ir.front.values import UNKNOWN, value_of

_NAMES = ("type", "callable")
_hidden: list[tuple[dict[str, Any], str]] | None = None  # the globals that are set, while a model is traced


@contextmanager
def answering_classes(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """A context in which `answer_in` acts. ``refuse`` gives the error to raise for a value that is not known."""
    global _hidden
    _Answer.refuse = staticmethod(refuse)
    _hidden = []
    try:
        yield
    finally:
        for names, name in _hidden:
            names.pop(name, None)
        _hidden = None


def answer_in(frame: FrameType, name: str) -> None:
    """Hide the builtin of that name in the module of a function that is about to run, if that is not one of Python's own."""
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    if _hidden is None or name not in _NAMES or name in frame.f_globals or module in sys.stdlib_module_names:
        return
    frame.f_globals[name] = _Answer(getattr(builtins, name))
    _hidden.append((frame.f_globals, name))


class _Answer:
    """What stands for a builtin: it answers for proxies, and is the builtin for all else."""

    refuse: Callable[[str], Exception]

    def __init__(self, builtin: Any) -> None:
        self.builtin = builtin
        # What a metaclass calls: `type.__new__(kind, name, bases, namespace)`.
        self.__dict__.update({name: getattr(builtin, name) for name in ("__new__", "__init__", "__call__")})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not issubclass(type(args[0]), fx.Proxy):
            return self.builtin(*args, **kwargs)
        value = value_of(args[0])
        if value is UNKNOWN:
            raise self.refuse(f"{self.builtin.__name__}()")
        if self.builtin is type:
            return class_of(args[0], value)
        return self.builtin(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builtin, name)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.builtin)

    def __subclasscheck__(self, value: Any) -> bool:
        return issubclass(value, self.builtin)

    def __getitem__(self, item: Any) -> Any:
        return self.builtin[item]

    def __or__(self, other: Any) -> Any:
        return self.builtin | other

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.builtin

    def __hash__(self) -> int:
        return hash(self.builtin)


def class_of(proxy: fx.Proxy, value: Any) -> type:
    """The class of a value that is known. That of a fake tensor is that of the tensor which it stands for."""
    state = proxy.__dict__.get("tensor")
    if state is not None:
        return type(state)
    return torch.Tensor if isinstance(value, torch.Tensor) else type(value)
