"""What a step cannot have: inputs without numbers, wherever they are loaded, and what needs the whole mini-batch."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.specs import MicroBatches
from pippy.ir.base.readable import some
from pippy.ir.base.source import excerpt_of
from pippy.ir.base.trees import describe, leaves, tensors
from pippy.ir.cut.constraints import OUT_OF_FORWARD
from pippy.ir.cut.effects import find_mutations
from pippy.ir.record.compiled import Compiled

# Inputs that a step cannot have, wherever they are loaded.


def refuse_inputs(inputs: Sequence[Any], trains: bool) -> None:
    """Raise if some of the inputs have no numbers, or require gradients that nobody would get."""
    pieces = [each.values if isinstance(each, MicroBatches) else each for each in leaves(inputs)]
    held = list(tensors(pieces))
    if any(tensor.is_nested and tensor.layout is torch.strided for tensor in held):
        raise DriverError(
            "an input is a nested tensor of layout torch.strided, which cannot be cut or sent; make it with "
            "torch.nested.nested_tensor(rows, layout=torch.jagged), or pad it"
        )
    empty = [describe(tensor) for tensor in held if tensor.is_meta]
    if empty:
        raise DriverError(
            f"an input, {empty[0]}, is on the meta device and holds no numbers; only memory() takes such an input, "
            "so give run() a tensor on another device"
        )
    wanting = [describe(tensor) for tensor in held if tensor.requires_grad]
    if wanting and trains:
        raise DriverError(
            f"an input, {wanting[0]}, requires a gradient, but run() does not return gradients of inputs; detach "
            "it, or make it a parameter of the model"
        )


# Refuses what needs the whole mini-batch: embeddings with ``scale_grad_by_freq``, parameters that forward changes.


_PLACE_OF_FLAG: dict[Any, int] = {  # scale_grad_by_freq among the arguments
    F.embedding: 5,
    F.embedding_bag: 5,
    torch.ops.aten.embedding.default: 3,
    torch.ops.aten._embedding_bag.default: 3,
}


def check_whole_batch_gradients(compiled: Compiled, chunks: int) -> None:
    """Raise if a micro-batch would compute another gradient than its share of the mini-batch's."""
    lines = list(_scaled_by_frequency(compiled)) if chunks > 1 else []
    if lines:
        raise DriverError(
            "an embedding has scale_grad_by_freq=True: its gradient is divided by how often each word occurs in "
            f"the batch, but each of the {chunks} micro-batches would count only its own words; use chunks=1, or "
            "leave scale_grad_by_freq out:\n" + "\n".join(lines)
        )


def check_changed_parameters(compiled: Compiled, chunks: int) -> None:
    """Raise if forward changes a parameter, as an averaged teacher, and each micro-batch would do it again."""
    changed = dict(_changed_parameters(compiled)) if chunks > 1 else {}
    if changed:
        raise DriverError(
            f"forward changes {', '.join(some(list(map(repr, changed))))} in place. The plain model does so once; the "
            f"pipeline would do so {chunks} times, once for each micro-batch:\n"
            f"{next(iter(changed.values()))}\n"
            f"What to do: chunks=1{OUT_OF_FORWARD}"
        )


def _changed_parameters(compiled: Compiled) -> Iterator[tuple[str, str]]:
    """The parameters that the graphs of stages change in place, and the lines."""
    for name, stage in compiled.stages():
        nodes = stage.graph.nodes if isinstance(stage, fx.GraphModule) else ()
        targets = {str(node.target) for node in nodes if node.op in ("get_attr", "call_module")}
        held = {target: attrgetter(target)(stage) for target in targets}
        if not any(isinstance(each, nn.Parameter) for each in held.values()):
            continue
        for mutation in find_mutations(stage.graph, held)[0]:
            target = str(mutation.root.target)
            if mutation.root.op == "get_attr" and isinstance(held[target], nn.Parameter):
                yield compiled.remap_qualname(f"{name}.{target}"), excerpt_of(mutation.node)


def _scaled_by_frequency(compiled: Compiled) -> Iterator[str]:
    for call in compiled.split_gm.graph.find_nodes(op="call_module"):
        stage = compiled.stage(str(call.target))
        nodes = stage.graph.nodes if isinstance(stage, fx.GraphModule) else ()
        lines = {node.target: excerpt_of(node) for node in nodes if node.op == "call_module"}
        for name, module in stage.named_modules():
            if getattr(module, "scale_grad_by_freq", False) is True and any(
                p.requires_grad for p in module.parameters()
            ):
                yield lines.get(name, f"  {module!r}")
        yield from (excerpt_of(node) for node in nodes if node.op == "call_function" and _has_flag(node))


def _has_flag(node: fx.Node) -> bool:
    place = _PLACE_OF_FLAG.get(node.target)
    if place is None:
        return False
    return node.kwargs.get("scale_grad_by_freq", node.args[place] if len(node.args) > place else False) is True
