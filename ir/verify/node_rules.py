"""The rules for each kind of node that the top-level graph may contain.

    kind              how it is recognized        what it must be
    ────────────────────────────────────────────────────────────────────────────────────────────────────────────────
    placeholder       op                          an input of the model, or the loss's target, in their order
    stage             call_module submod_i        called once, in order; each argument the value its input is named after
    loss              call_module _loss           called once, with what the model returns, and the target
    getitem           operator.getitem            one output of a stage, or one gradient of a backward; each once
    backward          stage_backward              one for each call that the loss depends on, with exactly its inputs and
                                                  the gradients of its outputs
    add               torch.add                   two gradients of one value, the later use first
    output            op                          what the model returns, or the loss

A broken graph often breaks many rules at once, so a check yields all faults that it finds, and does not raise.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from pippy.ir.base.names import LOSS, stage_index
from pippy.ir.record.nodes import flat_inputs, is_getitem, is_stage_backward
from pippy.ir.run.stage_backward import SEED, stage_backward
from pippy.ir.verify.subject import Fault, Faults, Subject
from pippy.ir.verify.value_names import names_of, value_name


def check_placeholder(subject: Subject, node: fx.Node) -> Faults:
    if node.name not in subject.compiled.wiring.inputs:
        yield Fault(node, f"is no input of the model; its inputs are {list(subject.compiled.wiring.inputs)}")


def check_stage(subject: Subject, node: fx.Node) -> Faults:
    if node.name != node.target:
        yield Fault(node, f"the call of {node.target} is named {node.name}")
    module = subject.modules.get(str(node.target))
    if module is None:
        yield Fault(node, f"calls {node.target}, which the Pipe does not have")
        return
    if node.kwargs:
        yield Fault(node, f"has keyword arguments {list(node.kwargs)}; a stage takes positional ones only")
    wanted = [each.name for each in module.graph.find_nodes(op="placeholder")]
    given = [_name(subject, arg) for arg in node.args]
    if wanted != given:
        yield Fault(node, f"{node.target} takes ({', '.join(wanted)}) but is given ({', '.join(given)})")


def _name(subject: Subject, argument: Any) -> str:
    if not isinstance(argument, fx.Node):
        return repr(argument)
    return value_name(subject.compiled, argument) or f"no value: {argument.name}"


def check_loss(subject: Subject, node: fx.Node) -> Faults:
    compiled = subject.compiled
    if node.name != LOSS or compiled.loss is None or compiled.loss.value != LOSS:
        yield Fault(node, "the Pipe was made without a loss function")
    if LOSS not in compiled.split_gm._modules:
        yield Fault(node, "the Pipe has no module _loss")
    target = node.args[1] if len(node.args) == 2 else None
    if len(node.args) != 2 or node.kwargs or getattr(target, "name", None) != compiled.target_name:
        yield Fault(node, "must be called with what the model returns and the target")
    elif names_of(subject.compiled, node.args[0]) != compiled.wiring.outputs:
        yield Fault(
            node, f"is given {names_of(subject.compiled, node.args[0])}; the model returns {compiled.wiring.outputs}"
        )


def check_getitem(subject: Subject, node: fx.Node) -> Faults:
    source, index = node.args if len(node.args) == 2 and not node.kwargs else (None, None)
    if not isinstance(source, fx.Node) or not isinstance(index, int) or isinstance(index, bool):
        yield Fault(node, "must take one entry, by number, from a stage's outputs or a backward's gradients")
        return
    twins = [user for user in source.users if is_getitem(user) and user.args == node.args]
    if twins[0] is not node:
        yield Fault(node, f"takes the same entry as {twins[0].name}")
    if str(source.target) in subject.modules and not node.users:
        yield Fault(node, "is used by nothing")
    size = _entries(subject, source)
    if not 0 <= index < size:
        yield Fault(node, f"takes entry {index} of {source.name}, which has {size} to take")


def _entries(subject: Subject, source: fx.Node) -> int:
    """How many entries a `getitem` can take from a node."""
    if is_stage_backward(source):
        return len(source.kwargs.get("input_values") or ())  # type: ignore[arg-type]
    if str(source.target) in subject.modules:
        made = subject.compiled.stage_outputs(str(source.target))
        return len(made) if isinstance(made, tuple) else 0
    return 0


def check_backward(subject: Subject, node: fx.Node) -> Faults:
    if node.args or list(node.kwargs) != ["stage_output", "output_grads", "input_values"]:
        yield Fault(node, "must have exactly the keywords stage_output, output_grads and input_values")
        return
    call = node.kwargs["stage_output"]
    if not isinstance(call, fx.Node) or call not in subject.live or subject.backwards.get(call) is not node:
        yield Fault(node, "must be the one backward of a call that the loss depends on")
        return
    inputs = flat_inputs(call)
    if list(node.kwargs["input_values"]) != inputs:  # type: ignore[arg-type]
        yield Fault(node, f"has other input_values than {call.name} has inputs: {inputs}")
    yield from _check_output_gradients(subject, node, call)
    taken = {user.args[1] for user in node.users if is_getitem(user)}
    wanted = set() if all(value.op == "placeholder" for value in inputs) else set(range(len(inputs)))
    if taken != wanted:
        yield Fault(
            node, f"the gradients that are taken out of it are {sorted(map(str, taken))}; wanted {sorted(wanted)}"
        )


def _check_output_gradients(subject: Subject, node: fx.Node, call: fx.Node) -> Faults:
    given = node.kwargs["output_grads"]
    made = subject.compiled.stage_outputs(str(call.target)) if str(call.target) in subject.modules else None
    if not isinstance(made, tuple):
        yield from _check_gradient(subject, node, call, given)
        return
    if not isinstance(given, (tuple, list)) or len(given) != len(made):
        yield Fault(node, f"must have a gradient, or None, for each of the {len(made)} outputs of {call.name}")
        return
    items = {user.args[1]: user for user in call.users if is_getitem(user)}
    for index, gradient in enumerate(given):
        if index in items:
            yield from _check_gradient(subject, node, items[index], gradient)
        elif gradient is not None:
            yield Fault(node, f"has a gradient for output {index} of {call.name}, which nothing uses")


def _check_gradient(subject: Subject, node: fx.Node, value: fx.Node, given: Any) -> Faults:
    """The gradient of a value must be the sum of the gradients of all its uses. The gradient of the loss must be its seed."""
    if value is subject.loss_node:
        assert subject.compiled.loss is not None
        seed = subject.compiled.loss.seed
        if given != (None if value is node.kwargs["stage_output"] and seed == SEED else seed):
            yield Fault(node, f"must start from the loss's own gradient, {seed}, not from {given}")
        return
    wanted = subject.contributions.get(value, [])
    found = _summands(given)
    if found != wanted:
        names = [f"{backward.name}[{index}]" for backward, index in wanted]
        yield Fault(node, f"has {given} for the gradient of {value.name}; it must be {' + '.join(names) or None}")


def _summands(gradient: Any) -> list[tuple[Any, Any]]:
    """The summands of a gradient in the order of addition. Each is an entry of a backward node."""
    found: list[tuple[Any, Any]] = []
    seen: set[fx.Node] = set()
    while isinstance(gradient, fx.Node) and gradient.target is torch.add and gradient not in seen:
        seen.add(gradient)  # a broken graph may contain circles
        gradient, last = gradient.args
        found.append(_entry(last))
    if gradient is not None:
        found.append(_entry(gradient))
    return found[::-1]


def _entry(gradient: Any) -> tuple[Any, Any]:
    if isinstance(gradient, fx.Node) and is_getitem(gradient) and len(gradient.args) == 2:
        return gradient.args[0], gradient.args[1]
    return gradient, None


def check_add(subject: Subject, node: fx.Node) -> Faults:
    if len(node.args) != 2 or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
        yield Fault(node, "must add two gradients")
    if len(node.users) != 1:
        yield Fault(node, f"is used {len(node.users)} times; a sum of gradients is used once")


def check_output(subject: Subject, node: fx.Node) -> Faults:
    compiled = subject.compiled
    if compiled.loss is not None and compiled.loss.value == LOSS:
        if getattr(node.args[0], "name", None) != LOSS:
            yield Fault(node, f"must return _loss, not {node.args[0]}")
    elif names_of(subject.compiled, node.args[0]) != compiled.wiring.outputs:
        yield Fault(
            node, f"returns {names_of(subject.compiled, node.args[0])}; the model returns {compiled.wiring.outputs}"
        )


class NodeRule(NamedTuple):
    """A row of the table: how a kind of node is recognized, and the check of such a node."""

    kind: str
    matches: Callable[[fx.Node], bool]
    check: Callable[[Subject, fx.Node], Faults]


def _calls(target: Callable[..., Any]) -> Callable[[fx.Node], bool]:
    return lambda node: node.op == "call_function" and node.target is target


NODE_RULES = (
    NodeRule("placeholder", lambda node: node.op == "placeholder", check_placeholder),
    NodeRule("stage", lambda node: node.op == "call_module" and stage_index(str(node.target)) is not None, check_stage),
    NodeRule("loss", lambda node: node.op == "call_module" and node.target == LOSS, check_loss),
    NodeRule("getitem", _calls(operator.getitem), check_getitem),
    NodeRule("backward", _calls(stage_backward), check_backward),
    NodeRule("add", _calls(torch.add), check_add),
    NodeRule("output", lambda node: node.op == "output", check_output),
)
