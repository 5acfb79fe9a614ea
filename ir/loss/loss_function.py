"""A loss function of (output, target): the pass that makes it the last call of the graph, `_loss`.

before                                 after
──────────────────────────────────────────────────────────────────────
x                                      x
                                       target
submod_0 = submod_0(x)                 submod_0 = submod_0(x)
submod_1 = submod_1(submod_0)          submod_1 = submod_1(submod_0)
                                       _loss = _loss(submod_1, target)
return submod_1                        return _loss
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from pippy.ir.base.errors import LossError
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.loss.loss_wrappers import LossWrapper
from pippy.ir.record.compiled import Compiled, Loss
from pippy.ir.record.nodes import flat_inputs
from pippy.ir.record.wiring import Wiring


class FunctionLoss(nn.Module):
    """A module that calls a function, since the graph calls modules."""

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
    except (TypeError, ValueError):  # a function in C has no signature to check
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise LossError(
            f"loss_fn{signature} cannot be called as loss_fn(output, target): {error}. What else it needs, bind "
            "beforehand (functools.partial), or put model and loss in a LossWrapper whose forward takes it as an input"
        ) from None


def attach_loss_function(compiled: Compiled, loss_fn: Callable[..., Any], target_name: str) -> None:
    """Add an input for the target and the call ``loss_fn(output, target)``, and return its result."""
    module = loss_fn if isinstance(loss_fn, nn.Module) else FunctionLoss(loss_fn)
    top, graph = compiled.split_gm, compiled.split_gm.graph
    output = graph.output_node()
    if not output.all_input_nodes:
        raise LossError("the model returns nothing that is computed, so there is nothing to compute a loss of")
    with graph.inserting_before(_after_inputs(graph)):
        target = graph.create_node("placeholder", target_name, name=target_name)
    with graph.inserting_before(output):
        loss = graph.create_node("call_module", LOSS, (output.args[0], target), name=LOSS)
    output.args = (loss,)
    top.add_module(LOSS, _with_own_parameters(compiled, module))
    top.recompile()
    compiled.target_name, compiled.loss = target.name, Loss(loss.name)
    compiled.seen_inputs[LOSS] = tuple(enumerate(value.name for value in flat_inputs(loss)))
    compiled.wiring = Wiring(
        inputs=tuple(node.name for node in graph.find_nodes(op="placeholder")),
        outputs=compiled.wiring.outputs,
        values={**compiled.wiring.values, target.name: target.name, loss.name: loss.name},
    )


def _after_inputs(graph: fx.Graph) -> fx.Node:
    """The node before which a new input goes: after all other inputs, but before ``**kwargs``."""
    return next(node for node in graph.nodes if node.op != "placeholder" or str(node.target).startswith("**"))


def _with_own_parameters(compiled: Compiled, module: nn.Module) -> nn.Module:
    """The loss, with a copy of each parameter that it shares with a stage. The parameter is replicated then."""
    held = {id(tensor): (stage, name) for stage, part in compiled.stages() for name, tensor in part.named_parameters()}
    shared = {id(tensor): name for name, tensor in module.named_parameters() if id(tensor) in held}
    if not shared:
        return module
    loss = copy.deepcopy(
        module, {id(tensor): tensor for name, tensor in named_state(module) if id(tensor) not in shared}
    )
    copies = dict(named_state(loss))
    for key, name in shared.items():
        assert copies[name] is not None
        _record_copy(compiled, *held[key], name)
    return loss


def _record_copy(compiled: Compiled, stage: str, local: str, name: str) -> None:
    """Write down that ``name`` of the loss is a copy of the parameter ``local`` of a stage."""
    group = next((group for group in compiled.replicated_params if group.get(stage) == local), None)
    if group is None:
        group = {stage: local}
        compiled.replicated_params.append(group)
    group[LOSS] = name
    canonical = compiled.qualnames.canonical[compiled.qualnames.remap(f"{stage}.{local}")]
    compiled.qualnames.places[canonical] += (f"{LOSS}.{name}",)
