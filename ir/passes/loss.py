"""The loss: a function of (output, target) that becomes `_loss`, or one of the values that the model itself returns."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from pippy.ir.compiled import Compiled, Loss
from pippy.ir.errors import LossError
from pippy.ir.names import LOSS, named_state, stage_index
from pippy.ir.run.stage_backward import SEED

TARGET = "target"


class LossWrapper(nn.Module):
    """A model and its loss as one module; derive from it and write `forward` to say how they are connected.

    >>> class Regression(LossWrapper):
    ...     def forward(self, x, target, weight):
    ...         return weight * self.loss_fn(self.module(x), target)
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} has no forward of its own; write one that calls self.module and self.loss_fn and "
            "returns the loss, or use TrivialLossWrapper"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``, for a model with one input.

    >>> import torch
    >>> TrivialLossWrapper(nn.Identity(), nn.MSELoss())(torch.ones(2), torch.zeros(2))
    tensor(1.)
    """

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        return self.loss_fn(self.module(x), targets)


class FunctionLoss(nn.Module):
    """A free function as the module that the graph calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Any, target: Any) -> Any:
        return self.function(output, target)

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


def check_loss_function(loss_fn: object) -> None:
    """Refuse what cannot be called as ``loss_fn(output, target)``."""
    if isinstance(loss_fn, type):
        raise LossError(f"loss_fn is the class {loss_fn.__name__}; give an instance of it: {loss_fn.__name__}()")
    if not callable(loss_fn):
        raise LossError(f"loss_fn is a {type(loss_fn).__name__}; give a module or a function of (output, target)")
    if isinstance(loss_fn, LossWrapper):
        raise LossError(
            f"loss_fn is a {type(loss_fn).__name__}, which is a model with its loss; give it as the model: pipeline(wrapper)"
        )
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: the call will tell
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise LossError(
            f"loss_fn{signature} cannot be called as loss_fn(output, target): {error}. What else it needs, bind "
            "beforehand (functools.partial), or put model and loss in a LossWrapper whose forward takes it as an input"
        ) from None


def attach_loss_function(compiled: Compiled, loss_fn: Callable[..., Any]) -> None:
    """Make the Pipe compute ``loss_fn(output, target)``, with ``target`` as a further input."""
    module = loss_fn if isinstance(loss_fn, nn.Module) else FunctionLoss(loss_fn)
    top, graph = compiled.split_gm, compiled.split_gm.graph
    output = graph.output_node()
    if not output.all_input_nodes:
        raise LossError("the model returns nothing that is computed, so there is nothing to compute a loss of")
    with graph.inserting_before(_after_inputs(graph)):
        target = graph.placeholder(TARGET)
        target.target = target.name  # an input of the model may have the name
    with graph.inserting_before(output):
        loss = graph.create_node("call_module", LOSS, (output.args[0], target), name=LOSS)
    output.args = (loss,)
    top.add_module(LOSS, _with_own_parameters(compiled, module))
    top.recompile()
    compiled.target_name, compiled.loss = target.name, Loss(loss.name)
    compiled.wiring = replace(compiled.wiring, inputs=tuple(node.name for node in graph.find_nodes(op="placeholder")))


def _after_inputs(graph: fx.Graph) -> fx.Node:
    """Where a further input goes: after all others, but for ``**kwargs``."""
    return next(node for node in graph.nodes if node.op != "placeholder" or str(node.target).startswith("**"))


def _with_own_parameters(compiled: Compiled, module: nn.Module) -> nn.Module:
    """A loss that shares a parameter with a stage gets a replica, as another stage would."""
    held = {id(tensor): (stage, name) for stage, part in compiled.stages() for name, tensor in part.named_parameters()}
    shared = {id(tensor): name for name, tensor in module.named_parameters() if id(tensor) in held}
    if not shared:
        return module
    own = copy.deepcopy(
        module, {id(tensor): tensor for name, tensor in named_state(module) if id(tensor) not in shared}
    )
    copies = dict(named_state(own))
    for key, name in shared.items():
        assert copies[name] is not None
        stage, local = held[key]
        group = next((group for group in compiled.replicated_params if group.get(stage) == local), None)
        if group is None:
            group = {stage: local}
            compiled.replicated_params.append(group)
        group[LOSS] = name
        canonical = compiled.qualnames.canonical[compiled.qualnames.remap(f"{stage}.{local}")]
        compiled.qualnames.places[canonical] += (f"{LOSS}.{name}",)
    return own


LossSpec = bool | str | int | Sequence[Any] | Mapping[str, Any] | None


def default_loss_spec(compiled: Compiled, model: nn.Module) -> LossSpec:
    """Which output is the loss where the user did not say: all of a LossWrapper's, or a dict's "loss"."""
    output = compiled.split_gm.graph.output_node().args[0]
    declared = getattr(model, "loss_spec", None) if isinstance(model, LossWrapper) else None
    if declared is not None:
        return declared
    if isinstance(output, Mapping) and "loss" in output:
        return "loss"
    if isinstance(output, fx.Node) and "loss" in _fields_inside(compiled, output, Mapping):
        return "loss"
    if isinstance(model, LossWrapper):
        if isinstance(output, fx.Node):
            return True
        raise LossError(
            f"{type(model).__name__} returns {_shape(output)}; say with output_loss_value_spec which of it is the loss, for "
            "example (True, False) or {'loss': True, 'logits': False}"
        )
    return None


def find_returned_loss(compiled: Compiled, spec: LossSpec) -> None:
    """Mark as the loss that output of the Pipe which ``spec`` says."""
    if spec is None or spec is False:
        return
    output = compiled.split_gm.graph.output_node().args[0]
    found = list(_selected(output, spec, spec))
    if len(found) != 1:
        raise LossError(
            f"output_loss_value_spec {spec!r} marks {len(found)} values as the loss; mark exactly one of {_shape(output)}"
        )
    value, inner = found[0]
    if not isinstance(value, fx.Node) or value.op == "placeholder":
        raise LossError(f"output_loss_value_spec {spec!r} marks {value!r} as the loss, which no stage computes")
    compiled.loss = Loss(value.name, SEED if inner is True else _inner_seed(compiled, value, inner, spec))


def _selected(output: Any, spec: Any, whole: Any) -> list[tuple[Any, Any]]:
    """The values that the spec marks; with ``True``, or with the rest of the spec where it goes inside a value."""
    if spec is False or spec is None:
        return []
    if spec is True:
        if isinstance(output, fx.Node):
            return [(output, True)]
        hint = "mark one value in it" if isinstance(output, (Sequence, Mapping)) else "which is a constant"
        raise LossError(f"output_loss_value_spec {whole!r} marks {_shape(output)} as the loss; {hint}")
    if isinstance(output, fx.Node):
        return [(output, spec)]
    if isinstance(spec, (str, int)):
        spec = _as_structure(output, spec, whole)
    if isinstance(spec, Mapping) and isinstance(output, Mapping) and set(spec) == set(output):
        return [found for key in output for found in _selected(output[key], spec[key], whole)]
    if _is_sequence(spec) and _is_sequence(output) and len(spec) == len(output):
        return [found for item, its in zip(output, spec) for found in _selected(item, its, whole)]
    raise LossError(
        f"output_loss_value_spec {whole!r} does not have the shape of what the model returns, {_shape(output)}"
    )


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _as_structure(output: Any, key: str | int, whole: Any) -> Any:
    if isinstance(output, Mapping) and key in output:
        return {name: name == key for name in output}
    if isinstance(key, str) and key in getattr(output, "_fields", ()):
        return [name == key for name in output._fields]
    if _is_sequence(output) and isinstance(key, int) and -len(output) <= key < len(output):
        return [index == key % len(output) for index in range(len(output))]
    raise LossError(f"output_loss_value_spec {whole!r} names nothing in what the model returns, {_shape(output)}")


def _inner_seed(compiled: Compiled, value: fx.Node, spec: Any, whole: Any) -> list[Any]:
    """The seed for a loss inside a dataclass, named tuple or mapping that the last stage makes."""
    names = _fields_inside(compiled, value, object)
    if not names:
        raise LossError(
            f"output_loss_value_spec {whole!r} looks inside {value.name!r}, but tracing does not know what that is made of; "
            "return the loss as an output of its own"
        )
    flags = _field_flags(names, spec)
    if sum(flag is True for flag in flags) != 1:
        raise LossError(f"output_loss_value_spec {whole!r} does not mark one of the fields {names}")
    return [SEED if flag is True else None for flag in flags]


def _field_flags(names: list[str], spec: Any) -> list[Any]:
    """Which of the fields a spec marks; none if it does not fit them."""
    if isinstance(spec, Mapping):
        return [spec.get(name) for name in names] if set(spec) <= set(names) else []
    if _is_sequence(spec):
        return list(spec) if len(spec) == len(names) else []
    return [spec in (name, index, index - len(names)) for index, name in enumerate(names)]


def _fields_inside(compiled: Compiled, value: fx.Node, kind: type) -> list[str]:
    """The names of what a value of class ``kind`` holds, where a stage makes it by calling its class."""
    made = _maker(compiled, value)
    if made is None or not isinstance(made.target, type) or not issubclass(made.target, kind):
        return []
    if dataclasses.is_dataclass(made.target):
        return [field.name for field in dataclasses.fields(made.target)]
    if hasattr(made.target, "_fields"):
        return list(made.target._fields)
    return list(made.args[0]) if made.args and isinstance(made.args[0], Mapping) else []


def _maker(compiled: Compiled, value: fx.Node) -> fx.Node | None:
    """The node inside a stage that makes a value of the top-level graph."""
    call, index = (value, None) if value.op == "call_module" else value.args
    if not isinstance(call, fx.Node) or stage_index(str(call.target)) is None:
        return None
    made: Any = compiled.stage(str(call.target)).graph.output_node().args[0]
    return made[index] if index is not None else made


def _shape(output: Any) -> str:
    if isinstance(output, fx.Node):
        return f"the value {output.name!r}"
    if isinstance(output, Mapping):
        return f"a dict with {list(output)}"
    if _is_sequence(output):
        return f"a {type(output).__name__.removeprefix('immutable_')} of {len(output)}"
    return repr(output)
