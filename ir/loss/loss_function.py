"""A loss function of (output, target): the pass that makes it the last call of the graph, `_loss`.

before                                 after
──────────────────────────────────────────────────────────────────────
x                                      x
                                       target
submod_0 = submod_0(x)                 submod_0 = submod_0(x)
submod_1 = submod_1(submod_0)          submod_1 = submod_1(submod_0)
                                       _loss = _loss(submod_1, target)
return submod_1                        return _loss

A loss that needs more than (output, target) is a part of the model: a `LossWrapper`.

The user gives the target by its name, so no operation may have this name, or that of the loss: `reserve_names`.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.errors import LossError
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.base.surroundings import OwnFunctionMode
from pippy.ir.base.trees import tensors
from pippy.ir.call.signature import free_name
from pippy.ir.cut.params import replica_of
from pippy.ir.cut.uses import running_statistics
from pippy.ir.cut.ways import names_gradients
from pippy.ir.record.compiled import Compiled, Loss, Traced, Wiring, flat_inputs
from pippy.ir.record.reached import ModelTensors, reached_by
from pippy.ir.run.graph_module import install


class LossWrapper(nn.Module):
    """A model and its loss as one module. Derive from it, and write a `forward` that calls both and returns the loss.

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
            f"{type(self).__name__} has no forward; write a forward that calls self.module and self.loss_fn and "
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
    """A module that calls a function, since the graph calls modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Any, target: Any) -> Any:
        return self.function(output, target)

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


class WatchedLoss(FunctionLoss):
    """A loss function whose code names `torch.autograd.grad`. The gradients that it computes may not lead into the model.

    grad(critic(mixed).sum(), mixed)   mixed is made in the loss: as in the plain model
    grad(output.sum(), x)              refused: the way from x to the model's output is in the stages
    """

    def forward(self, output: Any, target: Any) -> Any:
        with _RefusingGradients(output):
            return super().forward(output, target)


class _RefusingGradients(OwnFunctionMode):
    """Knows the leaves that a loss is given for the model's output, and refuses gradients that lead on into the model."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.given = {id(value): value for value in tensors(output) if value.requires_grad}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.autograd.grad:
            self._check(*args[:2])
        return function(*args, **(kwargs or {}))

    def _check(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        reached, leaves = _leaves_below(outputs), {id(value) for value in inputs if value.is_leaf}
        lead_on = self.given.keys() & reached - leaves
        if lead_on and (leaves - reached or leaves & self.given.keys()):
            raise LossError(
                "the loss computes a gradient by torch.autograd.grad of the model's output, and the way to what it is "
                "differentiated by leads through the stages, which have autograd graphs of their own.\n"
                "What to do: compute that gradient in the model's forward, in one stage, and return it beside the output"
            )


def _leaves_below(outputs: Sequence[Any]) -> set[int]:
    """The ids of the leaves that autograd knows a way to, from any of these tensors."""
    seen, waiting = set[Any](), [value.grad_fn for value in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [other for other, _ in node.next_functions]
    return {id(getattr(end, "variable", end)) for end in (*seen, *outputs)}


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


def attach_loss_function(
    compiled: Compiled, loss_fn: Callable[..., Any], target_name: str, model: ModelTensors
) -> None:
    """Add an input for the target and the call ``loss_fn(output, target)``, and return its result."""
    module = loss_fn if isinstance(loss_fn, nn.Module) else FunctionLoss(loss_fn)
    module = WatchedLoss(loss_fn) if names_gradients(loss_fn) else module
    top, graph = compiled.split_gm, compiled.split_gm.graph
    output = graph.output_node()
    if not output.all_input_nodes:
        raise LossError("the model returns nothing that is computed, so there is nothing to compute a loss of")
    with graph.inserting_before(_after_inputs(graph)):
        target = graph.create_node("placeholder", target_name, name=target_name)
    with graph.inserting_before(output):
        loss = graph.create_node("call_module", LOSS, (output.args[0], target), name=LOSS)
    output.args = (loss,)
    top.add_module(LOSS, _with_own_parameters(compiled, module, model))
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


def _with_own_parameters(compiled: Compiled, module: nn.Module, model: ModelTensors) -> nn.Module:
    """The loss, which holds what it has registered of the model, and what it reaches there by plain references.

    Of a parameter that a stage has, too, it holds a copy: the parameter is replicated then.
    """
    registered = {id(tensor): tensor for _, tensor in named_state(module)}
    loss_fn = module.function if isinstance(module, FunctionLoss) else module
    found = model.among(reached_by(loss_fn, "loss_fn"), registered, LossError)
    changing = running_statistics(compiled.split_gm.modules())
    for each in found:
        if id(each.value) in changing:
            raise LossError(f"{each} changes in each micro-batch; let the model return what the loss needs of it")
    held = {**registered, **{id(each.value): each.value for each in found}}
    own = {key: _own_of(compiled, tensor, model.names[key]) for key, tensor in held.items() if key in model.names}
    if any(own.get(key, tensor) is not tensor for key, tensor in registered.items()):
        module = copy.deepcopy(module, {**model.tensors, **registered, **own})
    if found and not isinstance(module, FunctionLoss):
        module = FunctionLoss(module)
    for each in found:
        install(module, f"model.{model.names[id(each.value)]}", own[id(each.value)], module)
    names = {id(tensor): model.names[key] for key, tensor in own.items()}
    for local, tensor in named_state(module):
        if (name := names.pop(id(tensor), None)) is not None:
            _record(compiled, name, local, isinstance(tensor, nn.Parameter))
    return module


def _own_of(compiled: Compiled, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """What the loss holds of a tensor of the model."""
    is_copied = isinstance(tensor, nn.Parameter) and name in compiled.qualnames.places
    return replica_of(tensor) if is_copied else tensor


def _record(compiled: Compiled, name: str, local: str, is_parameter: bool) -> None:
    """Write down that the loss holds a tensor of the model: ``local``, its own or a copy of that of a stage."""
    names = compiled.qualnames
    before = names.places.get(name, ())
    names.places[name] = (*before, f"{LOSS}.{local}")
    names.unused.pop(name, None)
    if before and is_parameter:
        stage, _, own = before[0].partition(".")
        group = next((each for each in compiled.replicated_params if each.get(stage) == own), None)
        if group is None:
            compiled.replicated_params.append(group := {stage: own})
        group[LOSS] = local
    elif before:
        names.note_readers(name)


def reserve_names(traced: Traced) -> None:
    """Rename the nodes that have the names which the target and the loss will have."""
    names = {node.name for node in traced.graph.nodes}
    reserved = {traced.name_for_target(), LOSS}
    for node in traced.graph.nodes:
        if node.op != "placeholder" and node.name in reserved:
            node.name = free_name(f"{node.name}_value", names)
