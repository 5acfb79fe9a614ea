"""Makes graph modules from a plan: one for each stage, and the top-level graph that calls them."""

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.errors import SharedParameterError
from pippy.ir.base.names import LOSS, Qualnames, local_name, named_state, place, qualnames_of, stage_index
from pippy.ir.base.node_notes import (
    BYTES,
    DRAWS,
    GRADIENTS_OFF,
    IS_TENSOR,
    NAMED_DEVICE,
    NO_GRADIENT,
    ROW_SIZES,
    STAGE,
    NodeNote,
    NoteContent,
    copy_place,
)
from pippy.ir.cut.effects import Roots
from pippy.ir.cut.params import MultiUseParamSpec, replicas, replicated_names
from pippy.ir.cut.plan import CutPlan, StagePlan, make_plan
from pippy.ir.record.compiled import Compiled, Traced, ValueName, Wiring
from pippy.ir.run.checkpointed_parts import fetch_before_parts, is_begin, is_end
from pippy.ir.run.functions import own_copy, set_grad_mode
from pippy.ir.run.graph_module import PipeGraphModule, empty_graph_module, install
from pippy.ir.run.random_state import draw_key, seed_draws


def split(traced: Traced, spec: MultiUseParamSpec = None) -> Compiled:
    """Cut a marked graph into stages."""
    plan = make_plan(traced, spec)
    copies = replicas(plan.sharing)
    names = qualnames_of(traced.model)
    stages = {stage.name: _stage_module(plan, stage, copies.get(stage.index, {}), names) for stage in plan.stages}
    place(names, traced.model, stages)
    by_index = {stage.index: stages[stage.name] for stage in plan.stages}
    replicated = replicated_names(plan.sharing, by_index, copies)
    top, wiring = _top_level(plan, stages)
    return Compiled(
        split_gm=top,
        qualnames=names,
        replicated_params=replicated,
        wiring=wiring,
        signature=traced.signature,
        concrete_args=traced.concrete_args,
        required_inputs=traced.required_inputs,
        modes=traced.modes,
        kept_whole=traced.kept_whole,
        row_sizes=_noted(plan, ROW_SIZES),
        value_bytes=_noted(plan, BYTES),
        without_gradient=frozenset(
            value_name(plan, value) for stage in plan.stages for value in stage.inputs if NO_GRADIENT.of(value)
        ),
        seen_inputs={stage.name: _seen_inputs(plan, stage) for stage in plan.stages},
        guards=traced.guards,
    )


def _noted(plan: CutPlan, note: NodeNote[NoteContent]) -> dict[str, NoteContent]:
    """What is noted of the values that stages take and give, by their names."""
    values = {value for stage in plan.stages for value in (*stage.inputs, *stage.outputs)}
    return {value_name(plan, value): note.of(value) for value in values if note.is_at(value)}


def _seen_inputs(plan: CutPlan, stage: StagePlan) -> tuple[tuple[int, str], ...]:
    values = list(stage.inputs)
    return tuple((at, value_name(plan, values[at])) for at in seen_inputs(values, stage.index, plan.roots))


def _stage_module(
    plan: CutPlan, stage: StagePlan, copies: Mapping[int, torch.Tensor], names: Qualnames
) -> PipeGraphModule:
    module = empty_graph_module()
    module.training = plan.traced.model.training
    builder = _StageGraph(plan, stage)
    graph = builder.build()
    memo = _copy_memo(plan.traced.model, copies)
    for target in sorted(builder.targets, key=lambda target: target.count(".")):  # a module before its parts
        held = _for_stage(target, plan.traced.attributes[target], copies, memo)
        install(module, target, held, plan.traced.model, target in names.saved)
    registered = {id(tensor) for _, tensor in named_state(module)}
    for key, shared in plan.used.items():  # what modules, hooks and functions of the stage reach by plain references
        if stage.index in shared.by_leaf and id(tensor := copies.get(key, shared.tensor)) not in registered:
            install(module, shared.name, tensor, plan.traced.model, shared.name in names.saved)
    module.graph = graph
    return module


def _copy_memo(model: nn.Module, copies: Mapping[int, torch.Tensor]) -> dict[int, Any]:
    """A memo for deepcopy, which then keeps every tensor of the model, and replaces the replicated ones by their copies."""
    if not copies:
        return {}
    return {**{id(tensor): tensor for _, tensor in named_state(model)}, **copies}


def _for_stage(target: str, value: Any, copies: Mapping[int, torch.Tensor], memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if isinstance(value, nn.Module) and any(id(tensor) in copies for _, tensor in named_state(value)):
        try:
            return copy.deepcopy(value, memo)
        except Exception as error:
            raise SharedParameterError(
                f"{target!r} ({type(value).__name__}) holds a parameter that several stages use, so the module must be "
                f"copied, but copy.deepcopy failed: {type(error).__name__}: {error}"
            ) from error
    return value


class _StageGraph:
    """Builds the graph of one stage."""

    def __init__(self, plan: CutPlan, stage: StagePlan) -> None:
        self.plan, self.stage, self.graph = plan, stage, fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.targets: dict[str, None] = {}  # in the order of their first use
        self.device: fx.Node | None = None  # what gives the device of the stage
        self.grad_mode: fx.Node | None = None  # while gradients are disabled: the node that disabled them
        self.modes_around: list[fx.Node | None] = []  # the same where each checkpointed part began that has not ended
        self.draw_key: fx.Node | None = None  # what gives the key that random numbers are drawn with

    def build(self) -> fx.Graph:
        for value in self.stage.inputs:
            self.values[value] = self._placeholder(value)
        for value in self.stage.inputs:
            if value in self.stage.copied:
                self.values[value] = self._own_copy(value)
        if any(DRAWS.is_at(node) for node in self.stage.nodes):
            self.draw_key = self.graph.call_function(draw_key)  # before all parts, whose second runs have it too
        for node in self.stage.nodes:
            self._follow_grad_mode(node)
            self._add(node)
        self._end_region()
        outputs = tuple(self._output(value) for value in self.stage.outputs)
        self.graph.output(outputs[0] if len(outputs) == 1 else outputs)
        fetch_before_parts(self.graph)
        return self.graph

    def _placeholder(self, value: fx.Node) -> fx.Node:
        node = self.graph.create_node("placeholder", value_name(self.plan, value), name=value_name(self.plan, value))
        copy_place(node, value)
        return node

    def _own_copy(self, value: fx.Node) -> fx.Node:
        node = self.graph.call_function(own_copy, (self.values[value],))
        copy_place(node, value)
        return node

    def _add(self, node: fx.Node) -> None:
        if is_begin(node):
            self.modes_around.append(self.grad_mode)
        elif is_end(node) and (around := self.modes_around.pop()) is not None:
            self.grad_mode = around  # not a node of the part, which what follows cannot use
        if DRAWS.is_at(node):
            self._seed(*DRAWS.of(node))
        copied = self.graph.node_copy(node, self._value)
        copy_place(copied, node)
        if NAMED_DEVICE.is_at(node):
            self._follow_device(copied, NAMED_DEVICE.of(node))
        if node.op == "call_module":
            self.targets[str(node.target)] = None
            copied.target = local_name(str(node.target))
        self.values[node] = copied

    def _seed(self, name: str, pythons: bool) -> None:
        self.graph.call_function(seed_draws, (self.draw_key, name), {"pythons": True} if pythons else {})

    def _follow_device(self, node: fx.Node, named: torch.device) -> None:
        """In place of the device where the model was traced, give an operation that of the stage's tensors."""
        if self.device is None:
            tensor = next((here for value, here in self.values.items() if IS_TENSOR.of(value)), None)
            if tensor is None:
                return
            with self.graph.inserting_before(node):
                self.device = self.graph.call_function(getattr, (tensor, "device"))
        arguments = node.args, node.kwargs
        node.args, node.kwargs = fx.node.map_aggregate(arguments, lambda each: self.device if each == named else each)

    def _value(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return self._attribute(self.plan.same[node])
        return self.values[node]

    def _attribute(self, node: fx.Node) -> fx.Node:
        if node not in self.values:
            self.targets[str(node.target)] = None
            attribute = self.graph.create_node("get_attr", local_name(str(node.target)), name=node.name)
            copy_place(attribute, node)
            self.values[node] = attribute
            if node in self.stage.copied:
                self.values[node] = self._own_copy(node)
        return self.values[node]

    def _follow_grad_mode(self, node: fx.Node) -> None:
        if not GRADIENTS_OFF.of(node):
            self._end_region()
        elif self.grad_mode is None:
            self.grad_mode = self.graph.call_function(set_grad_mode, (False,))

    def _end_region(self) -> None:
        if self.grad_mode is not None:
            self.graph.call_function(set_grad_mode, (self.grad_mode,))
            self.grad_mode = None

    def _output(self, value: fx.Node) -> fx.Node:
        made = self._value(value)
        if not is_snapshot(self.plan, value):
            return made
        # The stage changes the tensor again in the next micro-batch, perhaps before this value is used.
        return self.graph.create_node("call_function", own_copy, (made,), name=value_name(self.plan, value))


def is_snapshot(plan: CutPlan, value: fx.Node) -> bool:
    """Whether a value shares memory with a tensor of the model that its stage changes in place."""
    changed = {plan.same.get(change.root) for change in plan.mutations}
    return any(root.op == "get_attr" and plan.same[root] in changed for root in plan.roots[value])


def value_name(plan: CutPlan, value: fx.Node) -> str:
    """The name of a value. The node that makes it in its stage, and the placeholders that take it, have this name."""
    if value.op == "placeholder" and (value.name == LOSS or stage_index(value.name) is not None):
        return f"{value.name}_input"  # the call of a stage has the name itself
    return f"{value.name}_value" if is_snapshot(plan, value) else value.name


def _top_level(plan: CutPlan, stages: Mapping[str, PipeGraphModule]) -> tuple[PipeGraphModule, Wiring]:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in plan.traced.graph.find_nodes(op="placeholder"):
        values[node] = graph.create_node("placeholder", node.target, name=value_name(plan, node))
    for stage in plan.stages:
        call = graph.call_module(stage.name, tuple(values[value] for value in stage.inputs))
        call.name = stage.name
        values.update(_unpacked(graph, call, list(stage.outputs)))
    graph.output(fx.node.map_arg(plan.output, lambda node: values[plan.first_of(node)]))
    top = empty_graph_module()
    top.training = plan.traced.model.training
    for name, module in stages.items():
        top.add_module(name, module)
    top.graph = graph
    names = {node.name: value_name(plan, value) for value, node in values.items()}
    outputs = fx.node.map_arg(plan.output, lambda node: ValueName(value_name(plan, plan.first_of(node))))
    return top, Wiring(tuple(node.name for node in graph.find_nodes(op="placeholder")), outputs, names)


def _unpacked(graph: fx.Graph, call: fx.Node, outputs: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """A getitem for each output, if a stage has several. Those of transmitted parameters come first."""
    if len(outputs) == 1:
        return {outputs[0]: call}
    values = {}
    for index, value in enumerate(outputs):
        at = call if value.op == "get_attr" else graph._root.prev
        with graph.inserting_after(at):
            values[value] = graph.call_function(operator.getitem, (call, index))
    return values


# Which inputs of a stage it must not change in place, because somebody else would see that in the plain model.
#
# The graph shows most changes, and `constraints` refuses them, or lets the stage take a copy first. A module that is not
# traced may change its input too. Stages are checked for that when they run, and this says which inputs to look at:
#
#     an input of the model                    the caller has the tensor
#     a parameter or buffer that travels       the stage that owns it has it
#     a value that a later stage also uses     or the caller gets; or a view of it
#     a value and a view of it                 the stage is given two copies, and changes one


def seen_inputs(values: Sequence[fx.Node], stage: int, roots: Roots) -> list[int]:
    """The numbers of those inputs of a stage whose change in place would be seen elsewhere."""
    families = _sharing_memory(values, roots)
    return [
        index
        for index, value in enumerate(values)
        if any(root.op == "get_attr" for root in roots[value])
        or value.op == "placeholder"
        or _is_seen(families[value], values, stage)
    ]


def _sharing_memory(values: Sequence[fx.Node], roots: Roots) -> Mapping[fx.Node, list[fx.Node]]:
    """For each value, all nodes that may share its memory."""
    by_root: dict[fx.Node, list[fx.Node]] = {root: [] for value in values for root in roots[value]}
    for node, its_roots in roots.items():
        for root in its_roots:
            if root in by_root:
                by_root[root].append(node)
    return {value: [node for root in roots[value] for node in by_root[root]] for value in values}


def _is_seen(family: Sequence[fx.Node], given: Sequence[fx.Node], stage: int) -> bool:
    foreign = {node for node in family if STAGE.get(node) != stage}
    if sum(value in foreign for value in given) > 1:
        return True
    users = [user for value in foreign for user in value.users]
    return any(user.op == "output" or (STAGE.is_at(user) and STAGE.of(user) > stage) for user in users)
