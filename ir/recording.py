"""What torch.fx would lose while it traces, recorded: new tensors, custom autograd functions, in-place operators,
source lines, and the regions where gradients are off.

Plain symbolic tracing runs `torch.arange(n)` or `torch.rand(3)` once, at trace time, and bakes the result in; it traces
through an `autograd.Function` and so forgets its backward; and it does not see `torch.no_grad()`. Each of these gives a
graph that is silently another model.
"""

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from pippy.ir import source
from pippy.ir.errors import TracingError

# Functions that make a tensor from no tensor: nothing else tells the tracer about them.
_FACTORIES = [
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
    "tril_indices",
    "triu_indices",
]

_IN_PLACE = [
    "iadd",
    "iand",
    "ifloordiv",
    "ilshift",
    "imatmul",
    "imod",
    "imul",
    "ior",
    "ipow",
    "irshift",
    "isub",
    "itruediv",
    "ixor",
]


class RecordingProxy(fx.Proxy):
    """A proxy that records `x += y` and `x[i] = y` as the in-place operations that they are."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _in_place_method(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


for _name in _IN_PLACE:
    setattr(RecordingProxy, f"__{_name}__", _in_place_method(_name))


class AutogradFunction:
    """The `apply` of a custom autograd function, as something that a graph can call by name."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = function.__module__

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AutogradFunction) and self.function is other.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> tuple[Any, ...]:
        return AutogradFunction, (self.function,)


def set_grad_mode(enabled: bool) -> bool:
    """Turn gradients on or off, as a step of a graph; gives the mode before."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    return before


@contextmanager
def recording(tracer: fx.Tracer) -> Iterator[None]:
    """Inside, ``tracer`` records what the head of this file says."""
    with ExitStack() as stack:
        for name in _FACTORIES:
            stack.enter_context(patch.object(torch, name, _recorded_factory(tracer, getattr(torch, name))))
        stack.enter_context(patch.object(torch.autograd.Function, "apply", _recorded_apply(tracer)))
        stack.enter_context(_annotated_nodes(tracer))
        stack.enter_context(torch.enable_grad())
        yield


def _recorded_factory(tracer: fx.Tracer, factory: Callable[..., Any]) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_function", factory, args, kwargs)

    return record


def _recorded_apply(tracer: fx.Tracer) -> Any:
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch."):  # activation checkpointing and the like: trace what it wraps
            return original.__func__(cls, *args, **kwargs)
        return tracer.create_proxy("call_function", AutogradFunction(cls), args, kwargs)

    return classmethod(apply)


@contextmanager
def _annotated_nodes(tracer: fx.Tracer) -> Iterator[None]:
    """Every node knows its source line, its module, and whether gradients were off."""
    create_node, inference = tracer.create_node, torch.is_inference_mode_enabled()
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")

    def create(*args: Any, **kwargs: Any) -> fx.Node:
        if inference != torch.is_inference_mode_enabled():
            raise TracingError("the model enters torch.inference_mode() in its forward; use torch.no_grad() there")
        if autocast != (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")):
            raise TracingError(
                "the model enters torch.autocast in its forward, which a traced graph would lose; "
                "cast explicitly (x.to(dtype)), or move the region into a module that the tracer treats as a leaf"
            )
        node = create_node(*args, **kwargs)
        node.meta["source"] = source.of_frame(sys._getframe(1))
        node.meta["module_path"] = tracer.scope.module_path
        if not torch.is_grad_enabled():
            node.meta["no_grad"] = True
        return node

    tracer.create_node = create  # type: ignore[method-assign]
    try:
        yield
    finally:
        del tracer.create_node
