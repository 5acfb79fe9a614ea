"""Where a traced graph can be cut: its operations in order, the runs of them that must stay in one stage, and the marks.

A stage holds copies of what it is given. So an operation that changes a value in place stays with what made it, and
whatever is written by one operation and read inside a leaf module of another stays with its writer.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.cut.effects import find_mutations
from pippy.ir.cut.params import MultiUseParameterConfig, MultiUseParamSpec, config_by_tensor
from pippy.ir.cut.plan import is_operation
from pippy.ir.front.trace import Traced
from pippy.ir.marks import pipe_split
from pippy.ir.names import named_state
from pippy.ir.run.shared_tensors import has_gradient_hooks


@dataclass(frozen=True)
class Constraint:
    """The operations from number ``first`` to number ``last`` must be in one stage, and why."""

    first: int
    last: int
    why: str


@dataclass
class Uses:
    """The operations that use one tensor of the model, by number: by its name, or as a leaf module that holds it."""

    name: str
    tensor: torch.Tensor
    by_name: list[int] = field(default_factory=list)
    by_leaf: list[int] = field(default_factory=list)

    @property
    def all(self) -> list[int]:
        return sorted({*self.by_name, *self.by_leaf})


def operations(traced: Traced) -> list[fx.Node]:
    """The nodes that compute something, in order. A cut lies before one of them."""
    return [node for node in traced.graph.nodes if is_operation(node)]


def marks(traced: Traced) -> list[fx.Node]:
    """The marks that a traced graph has already."""
    return list(traced.graph.find_nodes(op="call_function", target=pipe_split))


def mark(traced: Traced, before: Iterable[fx.Node]) -> None:
    """Cut a traced graph before each of these operations, of which there may be none."""
    traced.balanced = True
    for node in before:
        with traced.graph.inserting_before(node):
            traced.graph.call_function(pipe_split)


def uses_of_tensors(traced: Traced) -> dict[int, Uses]:
    """Which operations use each parameter and buffer; keys are ids of the tensors."""
    number = {node: index for index, node in enumerate(operations(traced))}
    names = {id(tensor): name for name, tensor in reversed(list(named_state(traced.model)))}
    found: dict[int, Uses] = {}

    def uses(tensor: torch.Tensor, name: str) -> Uses:
        return found.setdefault(id(tensor), Uses(names.get(id(tensor), name), tensor))

    for node in traced.graph.nodes:
        if node.op == "get_attr" and isinstance(traced.attributes[str(node.target)], torch.Tensor):
            users = [number[user] for user in node.users if user in number]
            uses(traced.attributes[str(node.target)], str(node.target)).by_name.extend(users)
        elif node.op == "call_module":
            for name, tensor in _once(traced.attributes[str(node.target)]):
                uses(tensor, f"{node.target}.{name}").by_leaf.append(number[node])
    return found


def _once(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def constraints(traced: Traced, spec: MultiUseParamSpec = None, changed: Collection[int] = ()) -> list[Constraint]:
    """The runs of operations that cannot be cut.

    ``changed`` has ids of tensors that some module was seen to change when it ran, which no graph shows.
    """
    uses = uses_of_tensors(traced)
    found = [*_around_mutations(traced, uses), *_of_shared_tensors(traced, uses, spec, changed)]
    return [each for each in found if each.first < each.last]


def _around_mutations(traced: Traced, uses: Mapping[int, Uses]) -> Iterator[Constraint]:
    number = {node: index for index, node in enumerate(operations(traced))}
    for mutation in find_mutations(traced.graph, traced.attributes)[0]:
        root, last = mutation.root, number[mutation.node]
        why = f"{mutation.node.name} changes {mutation.target.name} in place"
        if root.op == "get_attr":
            tensor = uses[id(traced.attributes[str(root.target)])]
            # Later stages can be given the new value, but not a leaf module's own copy of it.
            after = tensor.all if is_constant(root) else tensor.by_leaf
            yield Constraint(min([last, *tensor.all]), max([last, *after]), why)
        elif root.op == "placeholder":
            users = [number[user] for user in root.users if user in number]
            yield Constraint(min([last, *users]), max([last, *users]), why)
        else:
            yield Constraint(number[root], last, why)


def is_constant(node: fx.Node) -> bool:
    """Whether a node gets a tensor that tracing itself put on the model."""
    return str(node.target).rpartition(".")[2].startswith("_tensor_constant")


def _of_shared_tensors(
    traced: Traced, uses: Mapping[int, Uses], spec: MultiUseParamSpec, changed: Collection[int]
) -> Iterator[Constraint]:
    config = config_by_tensor(traced.model, spec)
    written = {*changed, *_running_statistics(traced)}
    for key, each in uses.items():
        if not each.by_leaf or len(each.all) < 2:
            if len(each.all) > 1 and has_gradient_hooks(each.tensor) and _replicates(spec, config.get(key)):
                yield Constraint(each.all[0], each.all[-1], f"{each.name} has gradient hooks")
            continue
        transmitted = config.get(key, ("", None))[1] is MultiUseParameterConfig.TRANSMIT
        if key in written:
            yield Constraint(each.all[0], each.all[-1], f"a module changes {each.name} at each call")
        elif has_gradient_hooks(each.tensor):
            yield Constraint(each.all[0], each.all[-1], f"{each.name} has gradient hooks")
        elif transmitted:
            yield Constraint(each.all[0], each.by_leaf[-1], f"{each.name} is to be transmitted, out of a leaf module")
        elif each.tensor.requires_grad and not isinstance(each.tensor, nn.Parameter):
            yield Constraint(each.all[0], each.by_leaf[-1], f"{each.name} requires a gradient and is no parameter")


def _replicates(spec: MultiUseParamSpec, chosen: tuple[str, MultiUseParameterConfig] | None) -> bool:
    return MultiUseParameterConfig.REPLICATE in (spec, chosen[1] if chosen else None)


def _running_statistics(traced: Traced) -> Iterator[int]:
    """The ids of the buffers that batch norms change whenever they are called."""
    for value in traced.attributes.values():
        for module in value.modules() if isinstance(value, nn.Module) else ():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats and module.training:
                yield from (id(buffer) for buffer in module.buffers())


def crossing(traced: Traced, sizes: Mapping[fx.Node, int] | None = None, spec: MultiUseParamSpec = None) -> list[int]:
    """What crosses a cut before each operation: the bytes of the values made before and used after, or their number.

    ``sizes`` says the bytes of each value. A value that goes further than the next stage counts at each cut on its way.
    Inputs do not count, since the controller gives them to whoever uses them. A parameter that is used by name on both
    sides does, unless it is to be replicated.
    """
    nodes = operations(traced)
    number, steps = {node: index for index, node in enumerate(nodes)}, [0] * (len(nodes) + 1)

    def add(first: int, last: int, amount: int) -> None:
        if first < last:
            steps[first + 1] += amount
            steps[last + 1] -= amount

    for node in nodes:
        last = max((number[user] for user in node.users if user in number), default=-1)
        add(number[node], last, 1 if sizes is None else sizes.get(node, 0))
    config = config_by_tensor(traced.model, spec)
    for key, each in uses_of_tensors(traced).items():
        if each.by_name and not each.by_leaf and each.tensor.requires_grad and not _replicates(spec, config.get(key)):
            add(each.by_name[0], max(each.by_name), 1 if sizes is None else nbytes(each.tensor))
    return _running_sums(steps[:-1])


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of what a tensor holds."""
    return tensor.numel() * tensor.element_size()


def _running_sums(steps: Iterable[int]) -> list[int]:
    total, sums = 0, []
    for step in steps:
        total += step
        sums.append(total)
    return sums


def scopes(traced: Traced) -> dict[tuple[str, str], tuple[Any, list[int]]]:
    """Every call of a module while tracing, as (name of the call, name of the module): its class and its operations.

    A module that was called twice is there twice. What contains comes before what it contains.
    """
    found: dict[tuple[str, str], tuple[Any, list[int]]] = {}
    for index, node in enumerate(operations(traced)):
        stack = dict(node.meta.get("nn_module_stack") or {})
        if node.op == "call_module" and not stack:
            module = traced.attributes[str(node.target)]
            stack = {f"{node.target}@{node.name}": (str(node.target), type(module))}
        for call, (path, kind) in stack.items():
            found.setdefault((call, path), (kind, []))[1].append(index)
    return found
