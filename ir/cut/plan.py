"""From a marked graph to a plan of its stages: which node runs where, and which value goes from where to where.

x ──▶ [ stage 0 ] ── relu ──▶ [ stage 1 ] ── lin ──▶ [ stage 2 ] ──▶ output
           └──────────── skip ───────────────────────────▲
      (1) nodes between two marks      (2) values: node of one stage used by another, or by the output
      (3) tensors of the model: owned by one stage, transmitted like a value, replicated, or read by several
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pippy.ir import source
from pippy.ir.cut.effects import Mutation, find_mutations
from pippy.ir.cut.params import MultiUseParamSpec, SharedTensor, Sharing, check_leaf, decide
from pippy.ir.errors import MarkError, SplitError
from pippy.ir.front.trace import Traced
from pippy.ir.marks import pipe_split
from pippy.ir.names import named_state, stage_name


@dataclass
class StagePlan:
    """What one stage holds. Inputs and outputs are nodes of the traced graph, in the order of their first use."""

    index: int
    nodes: list[fx.Node] = field(default_factory=list)
    inputs: dict[fx.Node, None] = field(default_factory=dict)
    outputs: dict[fx.Node, None] = field(default_factory=dict)
    copied: set[fx.Node] = field(default_factory=set)  # inputs that the stage changes in place

    @property
    def name(self) -> str:
        return stage_name(self.index)


@dataclass
class CutPlan:
    """All stages, how they share the model's tensors, and which get_attr nodes stand for the same tensor."""

    traced: Traced
    stages: list[StagePlan]
    sharing: Sharing
    same: dict[fx.Node, fx.Node]
    mutations: list[Mutation]
    roots: dict[fx.Node, fx.Node]
    used: dict[int, SharedTensor]

    @property
    def output(self) -> Any:
        return self.traced.graph.output_node().args[0]

    def first_of(self, node: fx.Node) -> fx.Node:
        """The one node that stands for a value: of several that get the same attribute, the first."""
        return self.same.get(node, node)

    def tensor_of(self, node: fx.Node) -> Any:
        return self.traced.attributes[str(node.target)]


def make_plan(traced: Traced, spec: MultiUseParamSpec) -> CutPlan:
    """CutPlan the stages of a marked graph, or say why it cannot be cut there."""
    stages = _assign_nodes(traced)
    mutations, roots = find_mutations(traced.graph, traced.attributes)
    used = _used_tensors(traced, stages)
    sharing = decide(traced.model, used.values(), mutations, spec)
    plan = CutPlan(traced, stages, sharing, _same_attributes(traced), mutations, roots, used)
    _connect(plan)
    _isolate_mutations(plan)
    return plan


def is_operation(node: fx.Node) -> bool:
    """Whether a node computes something; inputs, attributes and marks have no stage of their own."""
    return node.op.startswith("call_") and node.target is not pipe_split


def _assign_nodes(traced: Traced) -> list[StagePlan]:
    stages, pending = [StagePlan(0)], None
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.target is pipe_split:
            if not stages[0].nodes:
                raise MarkError(
                    "the model is cut before its first operation, so the first stage would be empty; take this mark "
                    f"away:\n{source.excerpt_of(node)}"
                )
            pending = node
        elif is_operation(node):
            if pending is not None and stages[-1].nodes:
                stages.append(StagePlan(len(stages)))
            pending = None
            stages[-1].nodes.append(node)
            node.meta["stage"] = len(stages) - 1
    if not stages[0].nodes:
        raise SplitError(
            f"{type(traced.model).__name__} computes nothing: its forward has no operation to put in a stage"
        )
    _say_what_was_cut(traced, stages, pending)
    return stages


def _say_what_was_cut(traced: Traced, stages: list[StagePlan], trailing: fx.Node | None) -> None:
    if len(stages) == 1 and not traced.balanced:
        source.warn(
            f"{type(traced.model).__name__} has no mark that cuts it, so the Pipe has one stage; call pipe_split() in its "
            "forward or annotate_split_points(model, {'layer': SplitPoint.END})"
        )
    elif trailing is not None:
        source.warn(
            f"a mark after the model's last operation cuts nothing off and is ignored:\n{source.excerpt_of(trailing)}"
        )


def stage_of(node: fx.Node) -> int | None:
    """The stage that computes a node's value; None for inputs and attributes."""
    return node.meta.get("stage")


def _used_tensors(traced: Traced, stages: list[StagePlan]) -> dict[int, SharedTensor]:
    used: dict[int, SharedTensor] = {}
    for name, tensor in named_state(traced.model):
        used.setdefault(id(tensor), SharedTensor(name, tensor))
    for node in traced.graph.find_nodes(op="get_attr"):
        tensor = traced.attributes[str(node.target)]
        if not isinstance(tensor, torch.Tensor):  # a training flag: each stage has its own
            continue
        shared = used.setdefault(id(tensor), SharedTensor(str(node.target), tensor))
        shared.by_name.update(user.meta["stage"] for user in node.users if is_operation(user))
    calls: dict[str, set[int]] = {}
    for stage in stages:
        for node in stage.nodes:
            if node.op == "call_module":
                calls.setdefault(str(node.target), set()).add(stage.index)
    for target, callers in calls.items():
        module = traced.attributes[target]
        if len(callers) > 1:
            check_leaf(target, module, sorted(callers))
        for _, tensor in named_state(module):
            used.setdefault(id(tensor), SharedTensor(target, tensor)).by_leaf.update(callers)
    for node in traced.graph.output_node().all_input_nodes:
        if node.op == "get_attr":  # what the model returns is handed out by its first user, or else by the last stage
            shared = used[id(traced.attributes[str(node.target)])]
            shared.by_name.add(min(shared.stages, default=len(stages) - 1))
    return used


def _same_attributes(traced: Traced) -> dict[fx.Node, fx.Node]:
    first: dict[int | str, fx.Node] = {}
    same = {}
    for node in traced.graph.find_nodes(op="get_attr"):
        value = traced.attributes[str(node.target)]
        same[node] = first.setdefault(id(value) if isinstance(value, torch.Tensor) else str(node.target), node)
    return same


def _connect(plan: CutPlan) -> None:
    parameters: dict[int, list[fx.Node]] = {stage.index: [] for stage in plan.stages}
    for stage in plan.stages:
        for node in stage.nodes:
            for value in node.all_input_nodes:
                if value.op == "get_attr":
                    parameters[stage.index].append(plan.same[value])
                elif stage_of(value) != stage.index:
                    _send(plan, value, stage)
    for value in plan.traced.graph.output_node().all_input_nodes:
        if value.op == "get_attr":
            owner = plan.used[id(plan.tensor_of(value))].stages[0]
            plan.stages[owner].outputs[plan.same[value]] = None
        elif value.op != "placeholder":
            plan.stages[value.meta["stage"]].outputs[value] = None
    # Transmitted parameters follow the activations, as arguments and as outputs.
    for stage in plan.stages:
        for value in parameters[stage.index]:
            shared = plan.sharing.transmitted.get(id(plan.tensor_of(value)))
            if shared is not None and shared.stages[0] != stage.index:
                plan.stages[shared.stages[0]].outputs[value] = None
                stage.inputs[value] = None


def _send(plan: CutPlan, value: fx.Node, consumer: StagePlan) -> None:
    producer = stage_of(value)
    if producer is not None:
        plan.stages[producer].outputs[value] = None
    consumer.inputs[value] = None


def _isolate_mutations(plan: CutPlan) -> None:
    """Let a stage change a value that it was given only where nobody else relies on seeing, or not seeing, the change."""
    families: dict[fx.Node, list[fx.Node]] = {}
    for node, root in plan.roots.items():
        families.setdefault(root, []).append(node)
    for mutation in plan.mutations:
        stage = plan.stages[mutation.node.meta["stage"]]
        if mutation.root.op == "get_attr":
            if str(mutation.root.target).rpartition(".")[2].startswith("_tensor_constant"):
                _check_alone(mutation, families[mutation.root], stage)
                stage.copied.add(plan.same[mutation.root])
        elif stage_of(mutation.root) != stage.index:
            _check_alone(mutation, families[mutation.root], stage)
            stage.copied.update(value for value in families[mutation.root] if value in stage.inputs)


def _check_alone(mutation: Mutation, family: list[fx.Node], stage: StagePlan) -> None:
    given = [value for value in family if value in stage.inputs]
    seen_later = [
        user for value in family if stage_of(value) != stage.index for user in value.users if _is_after(user, stage)
    ]
    if len(given) > 1 or any(user is not mutation.node for user in seen_later):
        other = next(iter(seen_later), mutation.node)
        raise SplitError(
            f"{stage.name} changes {mutation.target.name!r} in place, which another stage made and more than this stage "
            "uses; stages hold copies of their own, so the others would not see the change.\n"
            f"changed here:\n{source.excerpt_of(mutation.node)}\nused here:\n{source.excerpt_of(other)}\n"
            "What to do: use the operation that makes a new tensor (x = x + y, inplace=False), or move the split"
        )


def _is_after(user: fx.Node, stage: StagePlan) -> bool:
    return user.op == "output" or (is_operation(user) and user.meta["stage"] > stage.index)
