"""The reference with the gradients of a value added in the order in which workers do: first those of each worker."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pippy import Pipe
from pippy.drivers.lowering.flow import loss_stage
from pippy.ir.base.names import stage_index
from pippy.ir.pipe import compiled_of
from pippy.ir.record.compiled import flat_inputs, is_getitem


def add_as_workers_do(pipe: Pipe, worker_of: Sequence[int]) -> Pipe:
    """Change the graph of a Pipe: what the stages of one worker give for a value is added first, the last stage's first.

    What the loss gives for an output of its own stage is added before all others.
    """
    compiled, graph = compiled_of(pipe), pipe.split_gm.graph
    own = loss_stage(compiled)

    def stage_of(call: fx.Node) -> int:
        index = stage_index(str(call.target))
        return own if index is None else index

    def summands(node: Any) -> list[Any]:
        return [each for arg in node.args for each in summands(arg)] if node.target is torch.add else [node]

    for root in graph.find_nodes(op="call_function", target=torch.add):
        if any(user.target is torch.add for user in root.users):
            continue
        groups: dict[object, list[Any]] = {}
        for each in summands(root):
            call = each.args[0].kwargs["stage_output"]
            value = flat_inputs(call)[each.args[1]]
            inside = stage_of(value.args[0] if is_getitem(value) else value) == stage_of(call)
            groups.setdefault("own" if inside else worker_of[stage_of(call)], []).append(each)
        with graph.inserting_before(root):
            total: Any = None
            for group in groups.values():
                found = group[0]
                for each in group[1:]:
                    found = graph.call_function(torch.add, (found, each))
                total = found if total is None else graph.call_function(torch.add, (total, found))
        root.replace_all_uses_with(total)
    for node in reversed(graph.find_nodes(op="call_function", target=torch.add)):
        if not node.users:
            graph.erase_node(node)
    return pipe
