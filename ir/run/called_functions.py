"""Functions that a graph calls as a whole: custom autograd functions, with their backward, and scripted functions.

torch.fx writes the name of a function into its code, so each of them has one. A scripted function travels as its code. In
another process it is a scripted module, which is called alike.
"""

import copyreg
import io
from typing import Any

import torch

_APPLY: Any = torch.autograd.Function.__dict__["apply"].__func__


class CalledFunction:
    """A function as a node calls it."""

    def __init__(self, function: Any, name: str) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name
        self.__module__ = "called"  # not torch.jit: generated code has what is not torch's among its globals

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.function is other.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function, self.__name__)


class AutogradFunction(CalledFunction):
    """The `apply` of a custom autograd function.

    That of `torch.autograd.Function`: what an `apply` of the class computes around it has nodes of its own.
    """

    def __call__(self, *args: Any) -> Any:
        return _APPLY(self.function, *args)


class ScriptedFunction(CalledFunction):
    """A function of `torch.jit.script` or `torch.jit.trace`.

    >>> import copy
    >>> halved = ScriptedFunction(torch.jit.trace(lambda x: x / 2, torch.ones(1)), "halved")
    >>> halved(torch.ones(1)), copy.copy(halved)(torch.ones(1))
    (tensor([0.5000]), tensor([0.5000]))
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _reduced(function: Any) -> tuple[Any, ...]:
    return _loaded, (function.save_to_buffer(),)


def _loaded(code: bytes) -> Any:
    return torch.jit.load(io.BytesIO(code))


copyreg.pickle(torch.jit.ScriptFunction, _reduced)
