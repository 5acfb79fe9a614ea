"""Functions that the graphs of stages call: those of pippy, and those of the user's that a graph calls as a whole.

The latter are custom autograd functions, with their backward, and scripted functions. torch.fx writes the name of a function
into its code, so each `CalledFunction` has one. A scripted function travels as its code. In another process it is a scripted
module, which is called alike.
"""

import copyreg
import io
from typing import Any

import torch

from pippy.ir.base.errors import GuardError, InputError
from pippy.ir.base.trees import describe, map_tensors

_OR_ONE = ", or run one micro-batch, chunks=1"  # a micro-batch then has the rows of the call


def set_grad_mode(enabled: bool) -> bool:
    """`torch.set_grad_enabled` as a node of a graph. Returns the mode before."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    return before


def check_tensor(value: Any) -> None:
    """Raise if a value is no tensor. While tracing, `isinstance(x, torch.Tensor)` was True for it."""
    if not isinstance(value, torch.Tensor):
        raise GuardError(
            "forward asked for the type of a value, which tracing took for a tensor, but it is a "
            f"{type(value).__name__}. Ask for something that is known while tracing, or keep the code whole with a "
            "tracer whose is_leaf_module returns True"
        )


def check_not_none(value: Any, has_example: bool = False) -> None:
    """Raise if a value is None. While tracing, `x is None` was False for it, also where an example was given."""
    if value is None:
        raise GuardError(
            "forward asked whether a value is None. The answer was No when it was traced, but now the value is None. "
            + "Make another Pipe with this call for its example (example_args=); or let" * (not has_example)
            + "Let" * has_example
            + " the code that computes the value decide what to do without it, or keep the code whole with a tracer whose "
            "is_leaf_module returns True"
        )


def check_same(value: Any, other: Any, line: str = "") -> None:
    """Raise if two values are not one object. While tracing, `y is x` was True for them."""
    if value is not other:
        raise GuardError(
            "forward asked whether two values are one object, and went on for yes; now they are two"
            + (f":\n  {line}\n" if line else "; ")
            + "What to do: make another Pipe with this call for its example, or compare what decides, as in x.is_contiguous()"
        )


def check_fixed(value: Any, fixed: Any, line: str = "", rows: int | None = None) -> None:
    """Raise if a value is not what it was while forward was traced, and Python asked for it.

    A value that depends on the number of ``rows`` says how many the example had.

    >>> check_fixed(3, 3)
    >>> check_fixed(4, 3, "net.py:7, in forward")
    Traceback (most recent call last):
      ...
    pippy.ir.base.errors.GuardError: forward asked for a value while it was traced, and went on for 3; now it is 4:
      net.py:7, in forward
    What to do: make another Pipe with this call for its example
    >>> check_fixed(False, True, rows=7)
    Traceback (most recent call last):
      ...
    pippy.ir.base.errors.GuardError: forward depends on the number of rows. It asked for a value while it was traced, and went on for True; now it is False; What to do: make another Pipe with this call for its example, or run one micro-batch, chunks=1
    """  # noqa: E501
    kinds = [next((kind for kind in (tuple, list) if isinstance(each, kind)), type(each)) for each in (value, fixed)]
    if kinds[0] is not kinds[1] or value != fixed:
        now = describe(value) if isinstance(value, torch.Tensor) else repr(value)
        raise GuardError(
            f"forward {'asked' if rows is None else 'depends on the number of rows. It asked'} for a value while it was "
            f"traced, and went on for {fixed!r}; now it is {now}"
            + (f":\n  {line}\n" if line else "; ")
            + f"What to do: make another Pipe with this call for its example{'' if rows is None else _OR_ONE}"
        )


CHECKS = frozenset((check_tensor, check_not_none, check_same, check_fixed))  # which raise a `GuardError`


def check_all_true(valid: torch.Tensor, line: str = "") -> None:
    """Raise if some parameters of a distribution, or values that its density is asked for, are not valid.

    >>> check_all_true(torch.tensor([True, False]), "net.py:7, in forward")
    Traceback (most recent call last):
      ...
    ValueError: a distribution was given 1 value that is not valid, such as a nan or a scale below zero:
      net.py:7, in forward
    """
    if not torch._is_all_true(valid):
        count = int((~valid).sum())
        raise ValueError(
            f"a distribution was given {count} value{'s that are' if count > 1 else ' that is'} not valid, such as a nan or a "
            "scale below zero" + (f":\n  {line}" if line else "")
        )


def check_padding(src: torch.Tensor, padding: torch.Tensor, training: bool, trained: bool) -> None:
    """Raise where `nn.TransformerEncoder` would leave the padding out, and the layers of a Pipe compute it."""
    if training or not torch.backends.mha.get_fastpath_enabled():
        return
    if torch.is_grad_enabled() and (trained or src.requires_grad):
        return
    if torch._nested_tensor_from_mask_left_aligned(src, padding.logical_not()):
        raise InputError(
            "nn.TransformerEncoder fills padded positions with zeros in evaluation without gradients, and its layers in a "
            "Pipe compute them. What to do: make the model with nn.TransformerEncoder(..., enable_nested_tensor=False), or "
            "leave the mask out if nothing is padded"
        )


def by_mode(training: bool, in_training: Any, in_eval: Any) -> Any:
    """One of two constants, chosen by the training flag.

    >>> by_mode(False, 0.1, 0.0)
    0.0
    """
    return in_training if training else in_eval


def own_copy(value: Any) -> Any:
    """A copy of a value, which can be changed in place. Gradients flow through it.

    >>> x = torch.zeros(2)
    >>> own_copy(x).add_(1), x
    (tensor([1., 1.]), tensor([0., 0.]))
    """
    return map_tensors(torch.clone, value)


def assign_(buffer: torch.Tensor, value: Any, name: str) -> None:
    """Write into a buffer what forward has assigned to it. Gradients do not flow through the buffer.

    >>> count = torch.zeros(2)
    >>> assign_(count, count + 1, "count")
    >>> count
    tensor([1., 1.])
    >>> assign_(count, torch.ones(3), "count")
    Traceback (most recent call last):
      ...
    pippy.ir.base.errors.InputError: forward assigns the buffer 'count', and what it assigns is float32[3]; the buffer is float32[2]
    What to do: give the buffer the shape and the dtype that forward assigns; or assign it in a module without a mark inside, which is called as a whole
    """  # noqa: E501
    difference = difference_from(buffer, value)
    if difference is not None:
        raise InputError(
            f"forward assigns the buffer {name!r}, and what it assigns {difference}\n"
            "What to do: give the buffer the shape and the dtype that forward assigns; or assign it in a module without a mark "
            "inside, which is called as a whole"
        )
    with torch.no_grad():
        buffer.copy_(value)


def difference_from(buffer: torch.Tensor, value: Any) -> str | None:
    """In what a value differs from a buffer, other than in its numbers; None if in nothing.

    >>> difference_from(torch.zeros(2), torch.ones(2, dtype=torch.int64))
    'is int64[2]; the buffer is float32[2]'
    """
    if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (buffer.shape, buffer.dtype):
        return None
    return f"is {describe(value)}; the buffer is {describe(buffer)}"


OF_STAGES = (*CHECKS, set_grad_mode, check_all_true, check_padding, by_mode, own_copy, assign_)
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
