"""The operations of a traced graph in their order, and which of them use each parameter and buffer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from pippy.ir.base.marks import pipe_split
from pippy.ir.base.names import first_names, named_state
from pippy.ir.record.traced import Traced


@dataclass
class TensorUses:
    """The numbers of the operations that use a tensor of the model: by its name, or as a leaf module that holds it."""

    name: str
    tensor: torch.Tensor
    by_name: list[int] = field(default_factory=list)
    by_leaf: list[int] = field(default_factory=list)

    @property
    def all(self) -> list[int]:
        """The operations of both kinds, in their order; none for a tensor that the forward does not use."""
        return sorted({*self.by_name, *self.by_leaf})


def is_operation(node: fx.Node) -> bool:
    """Whether a node computes something; inputs, attributes and marks have no stage of their own."""
    return node.op.startswith("call_") and node.target is not pipe_split


def operations(traced: Traced) -> list[fx.Node]:
    """The nodes that compute something, in order. A cut lies before one of them."""
    return [node for node in traced.graph.nodes if is_operation(node)]


def is_constant(node: fx.Node) -> bool:
    """Whether a node gets a tensor that tracing itself put on the model."""
    return node.op == "get_attr" and str(node.target).rpartition(".")[2].startswith("_tensor_constant")


def uses_of_tensors(traced: Traced) -> dict[int, TensorUses]:
    """Which operations use each parameter and buffer, in the order of the model; keys are ids of the tensors."""
    number = {node: index for index, node in enumerate(operations(traced))}
    tensors = {id(tensor): tensor for _, tensor in named_state(traced.model)}
    uses = {key: TensorUses(name, tensors[key]) for key, name in first_names(traced.model).items()}
    for node in traced.graph.nodes:
        users = [node] if node in number else [user for user in node.users if user in number]
        if node.op == "get_attr":
            tensor = traced.attributes[str(node.target)]
            if isinstance(tensor, torch.Tensor):  # not a training flag, of which each stage has its own
                by_name = uses.setdefault(id(tensor), TensorUses(str(node.target), tensor)).by_name
                by_name.extend(number[user] for user in users)
        elif node.op == "call_module":
            for name, tensor in _state(traced.attributes[str(node.target)]):
                uses.setdefault(id(tensor), TensorUses(f"{node.target}.{name}", tensor)).by_leaf.append(number[node])
        for tensor in () if is_constant(node) else traced.reached(node):
            uses[id(tensor)].by_leaf.extend(number[user] for user in users)
    return uses


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def running_statistics(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the buffers that norms among some modules change whenever they are called in training mode."""
    norms = (each for each in modules if isinstance(each, _NormBase) and each.track_running_stats)
    return {id(buffer) for norm in norms for buffer in norm.buffers()}
