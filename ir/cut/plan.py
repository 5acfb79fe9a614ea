"""Makes a plan of the stages from a marked graph: which nodes each stage has, and which values go from stage to stage.

x ──▶ [ stage 0 ] ── relu ──▶ [ stage 1 ] ── lin ──▶ [ stage 2 ] ──▶ output
           └──────────── skip ───────────────────────────▲
      (1) nodes between two marks      (2) values: nodes of one stage that another stage or the output uses
      (3) tensors of the model: owned by one stage, transmitted like a value, replicated, or read by several
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base import source
from pippy.ir.base.errors import MarkError, SharedParameterError, SplitError
from pippy.ir.base.marks import pipe_split
from pippy.ir.base.names import stage_name
from pippy.ir.base.node_notes import STAGE
from pippy.ir.base.source import excerpt_of
from pippy.ir.cut.constraints import check_constraints
from pippy.ir.cut.effects import Mutation, Roots, find_mutations
from pippy.ir.cut.params import MultiUseParamSpec, Sharing, TensorUses, decide
from pippy.ir.cut.uses import is_constant, is_operation, operations, uses_of_tensors
from pippy.ir.record.compiled import Traced
from pippy.ir.run.batch_norm import DeferredBatchNorm


@dataclass
class StagePlan:
    """The nodes of one stage. Inputs and outputs are nodes of the traced graph, in the order of their first use."""

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
    roots: Roots
    used: dict[int, TensorUses]

    @property
    def output(self) -> Any:
        return self.traced.graph.output_node().args[0]

    def first_of(self, node: fx.Node) -> fx.Node:
        """The node that represents a value: if several nodes get the same attribute, the first of them."""
        return self.same.get(node, node)

    def tensor_of(self, node: fx.Node) -> Any:
        return self.traced.attributes[str(node.target)]


def make_plan(traced: Traced, spec: MultiUseParamSpec) -> CutPlan:
    """Plan the stages of a marked graph, or raise an error that says why it cannot be cut at its marks."""
    stages = _assign_nodes(traced)
    check_deferred_statistics(traced)
    check_constraints(traced, [STAGE.of(node) for node in operations(traced)], spec)
    mutations, roots = find_mutations(traced.graph, traced.attributes)
    changed = {id(traced.attributes[str(each.root.target)]) for each in mutations if each.root.op == "get_attr"}
    used = _used_tensors(traced, len(stages))
    sharing = decide(traced.model, used.values(), changed, spec)
    plan = CutPlan(traced, stages, sharing, _same_attributes(traced), mutations, roots, used)
    _connect_stages(plan)
    _mark_copied(plan)
    return plan


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
            STAGE.put(node, len(stages) - 1)
    if not stages[0].nodes:
        raise SplitError(
            f"{type(traced.model).__name__} computes nothing: its forward has no operation to put in a stage"
        )
    _say_what_was_cut(traced, stages, pending)
    return stages


def _say_what_was_cut(traced: Traced, stages: list[StagePlan], trailing: fx.Node | None) -> None:
    name = type(traced.model).__name__
    if len(stages) == 1 and traced.untraced and not traced.balanced:
        source.warn(f"the Pipe has one stage, which calls {name} as a whole. {traced.untraced}")
    elif len(stages) == 1 and not traced.balanced:
        source.warn(
            f"{name} has no mark that cuts it, so the Pipe has one stage; call pipe_split() in its "
            "forward or annotate_split_points(model, {'layer': SplitPoint.END})"
        )
    elif trailing is not None:
        source.warn(
            f"a mark after the model's last operation cuts nothing off and is ignored:\n{source.excerpt_of(trailing)}"
        )


def stage_of(node: fx.Node) -> int | None:
    """The stage that computes a node's value; None for inputs and attributes."""
    return STAGE.get(node)


def _used_tensors(traced: Traced, stages: int) -> dict[int, TensorUses]:
    stage = [STAGE.of(node) for node in operations(traced)]
    used = {
        key: TensorUses(uses.name, uses.tensor, [stage[i] for i in uses.by_name], [stage[i] for i in uses.by_leaf])
        for key, uses in uses_of_tensors(traced).items()
    }
    for node in traced.graph.output_node().all_input_nodes:
        if node.op == "get_attr":  # the first stage that uses it returns it, or else the last stage
            shared = used[id(traced.attributes[str(node.target)])]
            shared.by_name.append(min(shared.all, default=stages - 1))
    return used


def _same_attributes(traced: Traced) -> dict[fx.Node, fx.Node]:
    first: dict[int | str, fx.Node] = {}
    same = {}
    for node in traced.graph.find_nodes(op="get_attr"):
        value = traced.attributes[str(node.target)]
        same[node] = first.setdefault(id(value) if isinstance(value, torch.Tensor) else str(node.target), node)
    return same


def _connect_stages(plan: CutPlan) -> None:
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
            owner = plan.used[id(plan.tensor_of(value))].all[0]
            plan.stages[owner].outputs[plan.same[value]] = None
        elif value.op != "placeholder":
            plan.stages[STAGE.of(value)].outputs[value] = None
    # Transmitted parameters come after the activations, in the arguments and in the outputs.
    for stage in plan.stages:
        for value in parameters[stage.index]:
            shared = plan.sharing.transmitted.get(id(plan.tensor_of(value)))
            if shared is not None and shared.all[0] != stage.index:
                plan.stages[shared.all[0]].outputs[value] = None
                stage.inputs[value] = None


def _send(plan: CutPlan, value: fx.Node, consumer: StagePlan) -> None:
    producer = stage_of(value)
    if producer is not None:
        plan.stages[producer].outputs[value] = None
    consumer.inputs[value] = None


def _mark_copied(plan: CutPlan) -> None:
    """Let each stage copy the values that it takes and changes in place: from earlier stages, inputs, constants."""
    for mutation in plan.mutations:
        root, stage = mutation.root, plan.stages[STAGE.of(mutation.node)]
        if is_constant(root):
            stage.copied.add(plan.same[root])
        elif root.op != "get_attr" and stage_of(root) != stage.index:
            stage.copied.update(value for value in stage.inputs if root in plan.roots[value])


# The running statistics of a `DeferredBatchNorm` change when a step ends: no operation may want those of the call before.


def check_deferred_statistics(traced: Traced) -> None:
    """Refuse operations that read running statistics after the norm was called, in training."""
    norms = [each for value in traced.attributes.values() for each in _training_norms(value)]
    if norms:
        uses, nodes = uses_of_tensors(traced), operations(traced)
        for buffer in (buffer for norm in norms for buffer in norm.buffers()):
            if id(buffer) in uses:
                _check(uses[id(buffer)], nodes)


def _training_norms(value: object) -> list[DeferredBatchNorm]:
    modules = value.modules() if isinstance(value, nn.Module) else ()
    return [each for each in modules if isinstance(each, DeferredBatchNorm) and each.training]


def _check(uses: TensorUses, nodes: list[fx.Node]) -> None:
    late = [number for number in uses.by_name if uses.by_leaf and number > min(uses.by_leaf)]
    if late:
        raise SharedParameterError(
            f"{uses.name!r} is read after the call of its DeferredBatchNorm, but the norm changes it only after all "
            "micro-batches:\n"
            f"{excerpt_of(nodes[late[0]])}\n"
            "What to do: read it before the norm is called, or do not convert this norm"
        )
