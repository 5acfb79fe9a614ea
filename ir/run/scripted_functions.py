"""A function of `torch.jit.script` or `torch.jit.trace`, in a form that a graph can call, and that travels as its code."""

import io
from typing import Any

import torch


class ScriptedFunction:
    """A scripted function as a node calls it.

    >>> import copy
    >>> halved = ScriptedFunction(torch.jit.trace(lambda x: x / 2, torch.ones(1)), "halved")
    >>> halved(torch.ones(1)), copy.copy(halved)(torch.ones(1))
    (tensor([0.5000]), tensor([0.5000]))
    """

    def __init__(self, function: Any, name: str) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name
        self.__module__ = "scripted"  # not torch.jit: generated code has what is not torch's among its globals

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScriptedFunction) and self.function is other.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.function.save_to_buffer(), self.__name__)


def _loaded(code: bytes, name: str) -> ScriptedFunction:
    return ScriptedFunction(torch.jit.load(io.BytesIO(code)), name)  # torch makes a module of it
