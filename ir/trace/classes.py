"""`type(x)`, `callable(x)` and `getattr(x, name, default)` of a traced value, for functions that have these names.

Python asks no object for its answer to `type(x)`. So while a function of the user's that has the name is traced, its module has
a global of that name, which hides the builtin. Other threads get the builtin's answers from it too.
"""

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import fx

from pippy.ir.base import source
from pippy.ir.base.trees import UNKNOWN
from pippy.ir.run.functions import check_tensor
from pippy.ir.trace.questions import refused_question
from pippy.ir.trace.values import value_of

_NAMES = frozenset(("type", "callable", "getattr"))
_hidden: list[tuple[dict[str, Any], str]] | None = None  # the globals that are set, while a model is traced


@contextmanager
def answering_classes() -> Iterator[None]:
    """A context in which `answer_in` acts."""
    global _hidden
    _hidden = []
    try:
        yield
    finally:
        for names, name in _hidden:
            names.pop(name, None)
        _hidden = None


def answer_in(frame: FrameType) -> None:
    """Hide the builtins that a function of the user's names, in its module, where it begins. Not in Python's own."""
    if not source.is_users(frame.f_code.co_filename) or _hidden is None:
        return
    for name in _NAMES.intersection(frame.f_code.co_names):
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if name not in frame.f_globals and module not in sys.stdlib_module_names:
            frame.f_globals[name] = _Answer(getattr(builtins, name))
            _hidden.append((frame.f_globals, name))


class _Answer:
    """What stands for a builtin: it answers for proxies, and is the builtin for all else."""

    def __init__(self, builtin: Any) -> None:
        self.builtin = builtin
        # What a metaclass calls: `type.__new__(kind, name, bases, namespace)`.
        self.__dict__.update({name: getattr(builtin, name) for name in ("__new__", "__init__", "__call__")})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args or kwargs or not issubclass(type(args[0]), fx.Proxy):
            return self.builtin(*args, **kwargs)
        if self.builtin is getattr:
            return _attribute(*args)
        if len(args) != 1:
            return self.builtin(*args)
        value = value_of(args[0])
        if value is UNKNOWN:
            raise refused_question(f"{self.builtin.__name__}()")
        if self.builtin is type:
            return class_of(args[0], value)
        return self.builtin(value)

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (self.builtin,)

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


def _attribute(proxy: fx.Proxy, name: str, *default: Any) -> Any:
    if default and value_of(proxy) is UNKNOWN and not hasattr(torch.Tensor, name):
        check_is_tensor(proxy)
        return default[0]
    return getattr(proxy, name, *default)


def check_is_tensor(proxy: fx.Proxy) -> None:
    """Have it checked that the value of a proxy is a tensor: what was asked has been answered as for one."""
    proxy.tracer.create_proxy("call_function", check_tensor, (proxy,), {})


def class_of(proxy: fx.Proxy, value: Any) -> type:
    """The class of a value that is known. That of a fake tensor is that of the tensor which it stands for."""
    state = proxy.__dict__.get("tensor")
    if state is not None:
        return type(state)
    return torch.Tensor if isinstance(value, torch.Tensor) else type(value)
