"""Runs a Pipe in this process, node by node. This is the reference: every driver must give the same numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pippy.ir.base.names import LOSS
from pippy.ir.base.trees import map_tensors
from pippy.ir.record.compiled import Compiled, forward_nodes, is_getitem, map_nodes, seeded, walk
from pippy.ir.run.batch_norm import StepStatistics
from pippy.ir.run.copies import GradientHooks, owners_in_place_of_copies, whole_gradients
from pippy.ir.run.in_place import check_inputs, check_unchanged, input_versions
from pippy.ir.run.may_draw import drawn_as_whole, seed_whole
from pippy.ir.run.random_state import draw_key
from pippy.ir.run.stage_backward import add_gradients, gradient_pairs, stage_backward, weighted
from pippy.ir.run.stage_run import StageRun, as_leaf, run_backward, run_stage

CallNote = Callable[[str, str, Any, Any], Any]


def run_reference(compiled: Compiled, inputs: Mapping[str, Any]) -> Any:
    """Run a Pipe and return its outputs. Its backward runs too, if it has one and gradients are enabled."""
    return run_microbatches(compiled, [inputs])[0]


def run_microbatches(
    compiled: Compiled,
    microbatches: Sequence[Mapping[str, Any]],
    weights: Sequence[float] | None = None,
    note: CallNote = lambda phase, call, takes, gives: gives,
) -> list[Any]:
    """Run several micro-batches and return the outputs of each. Their gradients add up.

    ``weights`` are the weights of their losses. With the weight 0 a loss has no gradient, and may be NaN. ``note`` is given the
    phase of each call of a stage, "F" or "B", its name, and what it takes and gives. Others are given what ``note`` returns.
    """
    runs = [
        _Reference(compiled, inputs, 1.0 if weights is None else weights[index], note)
        for index, inputs in enumerate(microbatches)
    ]
    if not runs[0].trains:
        with owners_in_place_of_copies(compiled.replicated_params, compiled.stage):
            return _outputs(compiled, runs)
    groups = compiled.copies()
    copied = {id(each) for group in groups for each in group}
    hooked = [(each,) for each in compiled.split_gm.parameters() if GradientHooks.of(each) and id(each) not in copied]
    with whole_gradients([*groups, *hooked]):
        outputs = _outputs(compiled, runs)
    return map_tensors(torch.Tensor.detach, outputs)


def _outputs(compiled: Compiled, runs: Sequence["_Reference"]) -> list[Any]:
    """Run the micro-batches of a mini-batch, and give the outputs of each."""
    if len(runs) == 1:
        return [runs[0].run()]
    statistics, outputs = StepStatistics(dict(compiled.stages()), compiled.qualnames.read_by_several), []
    with statistics.step():
        for statistics.microbatch, run in enumerate(runs):
            outputs.append(run.run())
    return outputs


class _Reference:
    """One run of the top-level graph: the values that later nodes read, and the leaves of each call, for its backward."""

    def __init__(self, compiled: Compiled, inputs: Mapping[str, Any], weight: float, note: CallNote) -> None:
        self.compiled, self.inputs, self.weight, self.note = compiled, inputs, weight, note
        self.trains = compiled.loss is not None and torch.is_grad_enabled()
        graph = compiled.split_gm.graph
        self.nodes = list(graph.nodes) if self.trains else forward_nodes(graph)
        self.with_backward = {node.kwargs["stage_output"] for node in self.nodes if node.target is stage_backward}
        self.values: dict[fx.Node, Any] = {}
        self.input_gradients: dict[str, Any] = {}
        self.runs: dict[fx.Node, StageRun] = {}

    def run(self) -> Any:
        output = walk(self.nodes, self._value, self.values, frees=True)
        self._give_to_caller()
        return output

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.inputs[node.name]
        if node.op == "call_module":
            return self._run_stage(node)
        if is_getitem(node):
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.target is stage_backward:
            return self._run_backward(node)
        return add_gradients(*(self.values[arg] for arg in node.args))  # type: ignore[index]

    def _run_stage(self, node: fx.Node) -> Any:
        leaves: list[Any] = []

        def take(arg: fx.Node) -> Any:
            leaves.append(as_leaf(self.values[arg]) if self.trains else self.values[arg])
            return leaves[-1]

        args = map_nodes(take, node.args)
        name, module = str(node.target), self.compiled.stage(str(node.target))
        seen = self.compiled.seen_inputs.get(name, ())
        if name == LOSS and draw_key() is not None:
            seed_whole(name, drawn_as_whole(module))
        with check_unchanged(name, module, self.compiled.qualnames.read_by_several.get(name, ())):
            before = input_versions(leaves, seen)
            outputs = run_stage(name, module, args)
            check_inputs(before, leaves, seen, name, module)
        if node in self.with_backward:
            self.runs[node] = StageRun(outputs, tuple(leaves))
        return self.note("F", name, leaves, outputs)

    def _run_backward(self, node: fx.Node) -> Any:
        call = node.kwargs["stage_output"]
        assert isinstance(call, fx.Node)
        output_grads = weighted(map_nodes(self.values.__getitem__, seeded(node.kwargs["output_grads"])), self.weight)
        run, name = self.runs.pop(call), str(call.target)
        gradients = run_backward(name, self.compiled.stage(name), run, output_grads)
        gradients = self.note("B", name, output_grads, gradients)
        for value, gradient in zip(node.kwargs["input_values"], gradients):  # type: ignore[arg-type]
            if value.op == "placeholder":
                before = self.input_gradients.get(value.name)
                self.input_gradients[value.name] = add_gradients(before, gradient)
        return gradients

    def _give_to_caller(self) -> None:
        """Run the backward of inputs that require gradients, for all at once, as plain PyTorch would."""
        named = self.input_gradients.items()
        pairs = [pair for name, gradient in named for pair in gradient_pairs(self.inputs[name], gradient)]
        if pairs:
            values, gradients = zip(*pairs)
            torch.autograd.backward(values, gradients)
