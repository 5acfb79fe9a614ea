"""An `nn.Sequential` as a graph that calls each child, with a mark between two children."""

import inspect

from torch import fx, nn

from pippy.ir.base.errors import SplitError, TracingError
from pippy.ir.base.marks import pipe_split
from pippy.ir.base.node_notes import IS_LAYER, MODULE_PATH
from pippy.ir.record.model_watch import hooks_of
from pippy.ir.record.traced import Traced
from pippy.ir.trace.layers import Layers, sequential_of


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
