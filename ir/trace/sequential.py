"""An `nn.Sequential` as a graph that calls each child, with a mark between two children."""

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.errors import PippyError, SplitError, TracingError
from pippy.ir.base.marks import pipe_split
from pippy.ir.base.node_notes import IS_LAYER, MODULE_PATH
from pippy.ir.record.compiled import Traced
from pippy.ir.record.model_watch import hooks_of
from pippy.ir.run.layers import FunctionLayer, LayerSpec, TiedLayer, TiedLayerSpec, note_spec

# A list of layers as an `nn.Sequential`: modules, functions, and layers that are made where they are used.


Layers = Sequence[Any] | nn.ModuleList  # of modules, of functions of one value, and of `LayerSpec`


def sequential_of(layers: Layers) -> nn.Sequential:
    """The layers in turn.

    >>> sequential_of([nn.ReLU(), abs])
    Sequential(
      (0): ReLU()
      (1): FunctionLayer(abs)
    )
    """
    tied: dict[str, tuple[TiedLayerSpec, nn.Module]] = {}
    return nn.Sequential(*[_as_module(number, layer, tied) for number, layer in enumerate(layers)])


def _as_module(number: int, layer: Any, tied: dict[str, tuple[TiedLayerSpec, nn.Module]]) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    if isinstance(layer, TiedLayerSpec):
        if layer.key not in tied:
            tied[layer.key] = layer, _made(number, layer)
        first, module = tied[layer.key]
        if (first.layer, first.args, first.kwargs) != (layer.layer, layer.args, layer.kwargs):
            raise TracingError(
                f"layer {number} is {layer}, and an earlier one with the key {layer.key!r} is {first}: they are one layer, so "
                "give them the same class and arguments, or two keys"
            )
        return module if layer.forward_fn is None else TiedLayer(module, layer.forward_fn)
    if isinstance(layer, LayerSpec):
        return _made(number, layer)
    if isinstance(layer, type) and issubclass(layer, nn.Module):
        raise TracingError(
            f"layer {number} is the class {layer.__name__}; give an instance of it: {layer.__name__}(...)"
        )
    if not callable(layer):
        raise TracingError(
            f"layer {number} is a {type(layer).__name__}; give a module, a LayerSpec, or a function of one value"
        )
    _check_holds_no_parameters(number, layer)
    return FunctionLayer(layer)


def _made(number: int, spec: LayerSpec) -> nn.Module:
    """The layer, without numbers."""
    try:
        with torch.device("meta"):
            module = spec.build()
    except PippyError:
        raise
    except Exception as error:  # what the user's class raises
        raise TracingError(
            f"layer {number}, {spec}, could not be made on the meta device, where tensors have no numbers: "
            f"{type(error).__name__}: {error}; if it needs numbers, give the layer itself in place of its LayerSpec"
        ) from error
    note_spec(module, spec)
    return module


def _check_holds_no_parameters(number: int, function: Any) -> None:
    """Raise if a function computes with parameters, which would be none of the model's: neither trained nor sent alike."""
    for name, value in _held(function):
        if isinstance(value, nn.Parameter) or (isinstance(value, nn.Module) and any(True for _ in value.parameters())):
            raise TracingError(
                f"layer {number} is a function that holds parameters, those of {name} ({type(value).__name__}). "
                "Parameters inside of a function are not found, so they would not be trained; write a module that "
                "has these parameters, and give the same module, or parameter, to all layers that share it"
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


def trace_sequential(model: nn.Sequential | Layers, marked: bool = True) -> Traced:
    """The graph of a Sequential, or of layers in turn. The balancer takes each for a layer, even one without parameters."""
    if isinstance(model, (list, tuple, nn.ModuleList)):
        model = sequential_of(model)
    if not isinstance(model, nn.Sequential):
        raise TracingError(
            f"from_sequential takes an nn.Sequential or a list of layers; this is a {type(model).__name__}: call "
            "pipeline(model) for any module"
        )
    if getattr(model.forward, "__func__", None) is not nn.Sequential.forward or hooks_of(model):
        raise TracingError(
            f"this {type(model).__name__} has a forward or hooks of its own, which from_sequential would leave out; "
            "call pipeline(model)"
        )
    if not len(model):
        raise SplitError("there are no layers, so there is nothing to put in a stage")
    graph = fx.Graph()
    value = graph.placeholder("input")
    for name in model._modules:
        if marked and value.op == "call_module":
            graph.call_function(pipe_split)
        value = graph.create_node("call_module", name, (value,))
        MODULE_PATH.put(value, name)
        IS_LAYER.put(value, True)
    graph.output(value)
    attributes = {name: module for name, module in model._modules.items() if module is not None}
    signature = inspect.Signature([inspect.Parameter("input", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    return Traced(model, graph, dict(attributes), signature=signature)
