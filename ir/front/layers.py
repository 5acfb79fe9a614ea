"""A list of layers as an `nn.Sequential`: modules, and functions among them."""

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from pippy.ir.errors import TracingError
from pippy.ir.run.layers import FunctionLayer

Layers = Sequence[Any] | nn.ModuleList  # of modules, and of functions of one value


def sequential_of(layers: Layers) -> nn.Sequential:
    """The layers in turn.

    >>> sequential_of([nn.ReLU(), abs])
    Sequential(
      (0): ReLU()
      (1): FunctionLayer(abs)
    )
    """
    return nn.Sequential(*[_module_of(number, layer) for number, layer in enumerate(layers)])


def _module_of(number: int, layer: Any) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    if isinstance(layer, type) and issubclass(layer, nn.Module):
        raise TracingError(
            f"layer {number} is the class {layer.__name__}; give an instance of it: {layer.__name__}(...)"
        )
    if not callable(layer):
        raise TracingError(f"layer {number} is a {type(layer).__name__}; give a module, or a function of one value")
    _check_holds_no_parameters(number, layer)
    return FunctionLayer(layer)


def _check_holds_no_parameters(number: int, function: Any) -> None:
    """Raise if a function computes with parameters, which would be none of the model's: neither trained nor sent alike."""
    for name, value in _held(function):
        if isinstance(value, nn.Parameter) or (isinstance(value, nn.Module) and any(True for _ in value.parameters())):
            raise TracingError(
                f"layer {number} is a function that holds parameters, those of {name} ({type(value).__name__}), which are not "
                "found inside of a function, and so would not be trained; make it a module that has them as its own, and give "
                "the same module, or parameter, to all that share it"
            )


def _held(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function computes with besides its argument, by name."""
    while isinstance(function, functools.partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(function.args))
        yield from function.keywords.items()
        function = function.func
    if inspect.ismethod(function):
        yield "self", function.__self__
        function = function.__func__
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        yield from (*used.nonlocals.items(), *used.globals.items())
        yield from ((name, each.default) for name, each in inspect.signature(function).parameters.items())
    elif not inspect.isclass(function):
        yield from getattr(function, "__dict__", {}).items()
