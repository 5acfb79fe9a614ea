"""The verifier: it checks every rule, and reports the violations in one error, which prints the graph with the faults.

The rules for stages say what their graphs may contain, and which stages must hold each tensor of the user's model.

The top-level graph is made again from the stages, the wiring and the loss. The one that a Pipe has must be the same.

of what                    is made
──────────────────────────────────────────────────────────────────────────────────────────────────────────────
the inputs in the wiring   placeholders, in their order; the loss's target is one of them
the stages, in order       call_module submod_i of the values that its inputs are named after; a getitem for each
                           output, where it has several
the outputs, the target    call_module _loss, with a loss function; and the output
the loss                   for each call that the loss depends on a stage_backward, a getitem for each gradient, and
                           torch.add for the gradients of a value with several uses
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pippy.ir.base.errors import NameLookupError, VerificationError
from pippy.ir.base.marks import pipe_split
from pippy.ir.base.names import LOSS, named_state, stage_name
from pippy.ir.base.readable import count_with_noun
from pippy.ir.loss.backward import write_backward
from pippy.ir.record.compiled import Compiled, ValueName, is_getitem
from pippy.ir.run.stage_backward import stage_backward


class Fault(NamedTuple):
    """A violation of a rule, and the node of the top-level graph that violates it, or None."""

    node: fx.Node | None
    message: str


FoundFaults = Iterator[Fault]


def examined(check: Callable[[Compiled], FoundFaults], compiled: Compiled) -> FoundFaults:
    """The faults that ``check`` finds. If it raises, because the graph is too broken to be read, that is a fault too."""
    try:
        yield from check(compiled)
    except Exception as error:  # a malformed graph can raise anything
        yield Fault(None, f"cannot be checked: {type(error).__name__}: {error}")


def check_rules(compiled: Compiled, before_backward: bool = False) -> None:
    """Check a compiled model against the rules of the IR, and raise one error with all violations.

    ``before_backward`` says that the model has its loss, but not its backward pass yet.
    """
    rules: list[Callable[[Compiled], FoundFaults]] = [
        partial(check_top_level, before_backward=before_backward),
        *STAGE_RULES,
    ]
    faults = [fault for rule in rules for fault in examined(rule, compiled)]
    if faults:
        raise VerificationError(
            f"the Pipe breaks {count_with_noun(len(faults), 'rule')}:\n"
            f"{marked_graph(list(compiled.split_gm.graph.nodes), faults)}",
            tuple(f"{fault.node.name}: {fault.message}" if fault.node else fault.message for fault in faults),
        )


def marked_graph(nodes: list[fx.Node], faults: list[Fault]) -> str:
    """The graph as text, with each fault under its node. Faults without a node are at the end."""
    lines = []
    for node in nodes:
        lines.append(f"    {text_of_node(node, node.args, node.kwargs)}")
        lines += [f"    ^^^ {fault.message}" for fault in faults if fault.node is node]
    lines += [f"- {fault.message}" for fault in faults if fault.node is None]
    return "\n".join(lines)


class _CannotMakeError(Exception):
    """What is recorded does not make a graph."""


def check_top_level(compiled: Compiled, before_backward: bool) -> FoundFaults:
    """The top-level graph is the one that the stages, the wiring and the loss make. Gives the first difference."""
    graph = compiled.split_gm.graph
    try:
        graph.lint()  # each node has a name of its own, and comes after the nodes that it uses
        expected = _Made(compiled)
        expected.finish(before_backward)
    except (_CannotMakeError, RuntimeError) as error:
        yield Fault(None, str(error))
        return
    same: dict[fx.Node, fx.Node] = {}
    yield from _first_difference(graph, expected.graph, same)
    if len(same) == len(expected.graph.nodes):
        yield from _check_values(compiled, {same[node].name: name for name, node in expected.values.items()})


class _Made:
    """The graph that is made, and the values in it by their names."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled, self.graph = compiled, fx.Graph()
        self.values: dict[str, fx.Node] = {}
        for name in compiled.wiring.inputs:
            self._put(name, self.graph.create_node("placeholder", name, name=name))
        for index, (name, stage) in enumerate(compiled.stages()):
            if name != stage_name(index) or not isinstance(stage, fx.GraphModule):
                raise _CannotMakeError(f"{name} is a {type(stage).__name__}; it must be stage {index}, a graph module")
            self._call(name, stage)

    def _put(self, name: str, node: fx.Node) -> None:
        if name in self.values:
            raise _CannotMakeError(
                f"{self.values[name]} and {node} stand for the value {name}; two values need two names"
            )
        self.values[name] = node

    def _value(self, name: str, of: str) -> fx.Node:
        if name not in self.values:
            raise _CannotMakeError(f"{of} takes the value {name}, which no input is, and no earlier stage makes")
        return self.values[name]

    def _call(self, name: str, stage: fx.GraphModule) -> None:
        inputs = [self._value(each.name, name) for each in stage.graph.find_nodes(op="placeholder")]
        call = self.graph.create_node("call_module", name, tuple(inputs), name=name)
        outputs = self.compiled.stage_outputs(name)
        if isinstance(outputs, fx.Node):
            self._put(outputs.name, call)
            return
        for index, output in enumerate(outputs):
            self._put(output.name, self.graph.call_function(operator.getitem, (call, index)))

    def finish(self, before_backward: bool) -> None:
        """Add the call of the loss, the output and the backward."""
        loss, target = self.compiled.loss, self.compiled.target_name
        output = fx.node.map_aggregate(
            self.compiled.wiring.outputs,
            lambda each: self._value(each, "the output") if isinstance(each, ValueName) else each,
        )
        has_function = loss is not None and loss.value == LOSS
        if has_function != (self.compiled.loss_module is not None):
            raise _CannotMakeError("the module _loss must be there if, and only if, the Pipe has a loss function")
        if has_function:
            arguments = output, self._value(str(target), LOSS)
            output = self.graph.create_node("call_module", LOSS, arguments, name=LOSS)
            self._put(LOSS, output)
        last = self.graph.output(output)
        if loss is not None:
            name = self.compiled.wiring.values.get(loss.value)
            if name not in self.values:
                raise _CannotMakeError(f"the loss is the value of {loss.value!r}, which the graph does not have")
            if not before_backward:
                with self.graph.inserting_before(last):
                    write_backward(self.graph, self.values[name], loss.seed)


def _first_difference(graph: fx.Graph, expected: fx.Graph, same: dict[fx.Node, fx.Node]) -> FoundFaults:
    """Where a graph is not the one that was made. The nodes until there are put into ``same``, by those that were made."""
    for node, wanted in zip_longest(_in_order(graph), _in_order(expected)):
        if wanted is None:
            yield Fault(node, "has no place in the graph")
            return
        if node is None or _content(node) != _content(wanted, same):
            yield Fault(node, f"must be {_text(wanted, same)}")
            return
        same[wanted] = node


def _in_order(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes. What is taken out of a value in one row is sorted: its order has no meaning."""
    for _, group in groupby(list(graph.nodes), lambda node: node.args[:1] if is_getitem(node) else node):
        yield from sorted(group, key=lambda node: str(node.args[1:]))


def _content(node: fx.Node, same: Mapping[fx.Node, fx.Node] | None = None) -> tuple[Any, ...]:
    """All that a node of a graph is, with the nodes that it uses by their names in the graph that is checked."""
    args, kwargs = _arguments(node, same)
    named = node.name if node.op in ("placeholder", "call_module") else ""
    return node.op, named, "" if node.op == "placeholder" else node.target, repr(args), repr(kwargs)


def _text(node: fx.Node, same: Mapping[fx.Node, fx.Node]) -> str:
    args, kwargs = _arguments(node, same)
    return text_of_node(node, args, kwargs)


def _arguments(node: fx.Node, same: Mapping[fx.Node, fx.Node] | None) -> tuple[Any, Any]:
    arguments = node.args, node.kwargs
    return arguments if same is None else fx.node.map_arg(arguments, same.__getitem__)


def text_of_node(node: fx.Node, args: Any, kwargs: Any) -> str:
    """A node with these arguments, as text."""
    if node.op == "placeholder":
        return node.name
    if node.op == "output":
        return f"return {', '.join(map(str, args))}"
    arguments = [str(arg) for arg in args] + [f"{name}={value}" for name, value in kwargs.items()]
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
    return f"{node.name} = {target}({', '.join(arguments)})"


def _check_values(compiled: Compiled, wanted: Mapping[str, str]) -> FoundFaults:
    """Every value is recorded under its name."""
    recorded, nodes = compiled.wiring.values, {node.name: node for node in compiled.split_gm.graph.nodes}
    for name in dict.fromkeys((*wanted, *recorded)):
        if wanted.get(name) != recorded.get(name):
            yield Fault(
                nodes.get(name), f"stands for the value {wanted.get(name)}, but is recorded as {recorded.get(name)}"
            )


def check_stage_graphs(compiled: Compiled) -> FoundFaults:
    """A stage uses only its inputs and the tensors and modules that it holds. It has no mark and no backward, and its last
    node is its output."""
    for name, module in compiled.stages():
        if not isinstance(module, fx.GraphModule):
            yield Fault(None, f"{name} is a {type(module).__name__}, not a graph module")
            continue
        seen: set[fx.Node] = set()
        for node in module.graph.nodes:
            yield from (Fault(None, f"{name}: {node.name} {fault}") for fault in _node_faults(module, node, seen))
            seen.add(node)
        if not seen or node.op != "output":
            yield Fault(None, f"{name}: the graph must end in its output")


def _node_faults(module: nn.Module, node: fx.Node, seen: set[fx.Node]) -> list[str]:
    faults = [f"uses {arg.name}, which is not there yet" for arg in node.all_input_nodes if arg not in seen]
    if node.op == "call_function" and node.target in (pipe_split, stage_backward):
        faults.append("has no place in a stage")
    if node.op in ("call_module", "get_attr") and not _has(module, str(node.target)):
        faults.append(f"names {node.target!r}, which the stage does not hold")
    if node.op == "placeholder" and (node.target != node.name or any(each.op != "placeholder" for each in seen)):
        faults.append("is an input, so it must come first and be named after its value")
    return faults


def _has(module: Any, target: str) -> bool:
    for atom in target.split("."):
        if not hasattr(module, atom):
            return False
        module = getattr(module, atom)
    return True


def check_names(compiled: Compiled) -> FoundFaults:
    """Every tensor of the user's model is in one stage, or is recorded as copies in several, or as unused."""
    names = compiled.qualnames
    actual: dict[str, list[str]] = {}
    for stage, module in compiled.stages():
        for local, tensor in named_state(module):
            canonical = _canonical(compiled, f"{stage}.{local}")
            if canonical is None and isinstance(tensor, nn.Parameter):
                yield Fault(None, f"{stage}.{local} is no parameter of the model's")
            if canonical is not None and not any(p.startswith(f"{stage}.") for p in actual.get(canonical, ())):
                actual.setdefault(canonical, []).append(f"{stage}.{local}")
    for canonical in sorted(set(names.canonical.values())):
        recorded = [place for place in names.places.get(canonical, ()) if not place.startswith(f"{LOSS}.")]
        if recorded != actual.get(canonical, []):
            yield Fault(None, f"{canonical!r} is in {actual.get(canonical, [])}, but is written down for {recorded}")
        if bool(names.places.get(canonical)) == (canonical in names.unused):
            yield Fault(None, f"{canonical!r} must be in a stage, or among the unused, and not both")
    unknown = (set(names.places) | set(names.unused)) - set(names.canonical.values())
    unknown |= set(names.saved) - set(names.canonical)
    if unknown:
        yield Fault(None, f"the model has no parameter or buffer named {sorted(unknown)}")


def _canonical(compiled: Compiled, place: str) -> str | None:
    try:
        return compiled.qualnames.canonical.get(compiled.remap_qualname(place))
    except NameLookupError:
        return None


def check_sharing(compiled: Compiled) -> FoundFaults:
    """No two stages hold the same parameter. Copies are in `replicated_params`, with equal shapes and dtypes."""
    holders: dict[int, list[str]] = {}
    for stage, module in compiled.split_gm.named_children():
        for name, parameter in module.named_parameters():
            holders.setdefault(id(parameter), []).append(f"{stage}.{name}")
    for places in holders.values():
        if len(places) > 1:
            yield Fault(None, f"{' and '.join(places)} are one and the same parameter; each stage must have a copy")
    written = Counter(
        frozenset(f"{stage}.{name}" for stage, name in group.items()) for group in compiled.replicated_params
    )
    wanted = Counter(frozenset(places) for places in _copied(compiled))
    for group_places in written - wanted:
        yield Fault(None, f"replicated_params has {sorted(group_places)}, which are not the copies of one parameter")
    for group_places in wanted - written:
        yield Fault(None, f"{sorted(group_places)} are copies of one parameter; replicated_params does not say so")
    for group in compiled.replicated_params:
        yield from _check_copies(compiled, group)


def _copied(compiled: Compiled) -> list[tuple[str, ...]]:
    """The stage-local names of each tensor that can have a gradient and is in several stages."""
    state = dict(named_state(compiled.split_gm))
    copied = []
    for places in compiled.qualnames.places.values():
        held = [state.get(place) for place in places]
        if len(places) > 1 and any(
            isinstance(each, nn.Parameter) or (each is not None and each.requires_grad) for each in held
        ):
            copied.append(places)
    return copied


def _check_copies(compiled: Compiled, group: dict[str, str]) -> FoundFaults:
    state = dict(named_state(compiled.split_gm))
    held = [state.get(f"{stage}.{name}") for stage, name in group.items()]
    if any(tensor is None for tensor in held):
        return  # check_sharing has yielded a fault for it
    if len({_likeness(tensor) for tensor in held}) > 1:
        yield Fault(None, f"the copies {group} differ in shape or dtype")


def _likeness(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    assert tensor is not None
    return tuple(tensor.shape), tensor.dtype  # the values, and requires_grad, follow the owner when the Pipe runs


STAGE_RULES: tuple[Callable[[Compiled], FoundFaults], ...] = (check_stage_graphs, check_names, check_sharing)
