"""The records that the passes fill, as plain data: of a traced model, and of a compiled one; and how their graphs are read.

A `Pipe` is the face of a compiled model for the user.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.errors import NameLookupError, SharedParameterError
from pippy.ir.base.names import LOSS, Qualnames, named_state, stage_index, stage_name
from pippy.ir.base.node_notes import SOURCE
from pippy.ir.base.readable import brief
from pippy.ir.base.trees import map_instances
from pippy.ir.call.signature import ModelCall, target_name
from pippy.ir.record.reached import ModelTensors, reached_by
from pippy.ir.run.graph_module import PipeGraphModule
from pippy.ir.run.in_place import get_tensor
from pippy.ir.run.stage_backward import SEED, stage_backward


@dataclass
class ModelModes:
    """How a model and its graph depend on the mode. True is training, as in `model.train(True)`.

    ``traced`` has the flags that forward reads, by the path of the module, as they were when it was traced. ``refused`` has
    the modes in which the graph is wrong, each with the line where the model does something else. ``after`` has, for each mode,
    the flags that `model.train(mode)` sets to the opposite; only a module with a `train` of its own does that.

    >>> modes = ModelModes(traced={"": True, "head": True}, refused={False: "net.py:3, in forward"})
    >>> modes.mode_of({"": False, "head": False})
    False
    """

    traced: dict[str, bool] = field(default_factory=dict)
    refused: dict[bool, str] = field(default_factory=dict)
    after: dict[bool, dict[str, bool]] = field(default_factory=dict)

    def flag(self, path: str, mode: bool) -> bool:
        """The training flag of a module after `train(mode)`."""
        return self.after.get(mode, {}).get(path, mode)

    def mode_of(self, flags: Mapping[str, bool]) -> bool | None:
        """The mode to which all these flags belong, of those that forward reads; None if some belong to another."""
        for mode in (True, False):
            if all(flags.get(path) == self.flag(path, mode) for path in self.traced):
                return mode
        return None

    def is_as_traced(self, flags: Mapping[str, bool]) -> bool:
        """Whether all flags that forward reads are as when it was traced."""
        return all(flags.get(path) == flag for path, flag in self.traced.items())


@dataclass
class Traced(ModelCall):
    """A marked graph, and what the names in it stand for.

    ``attributes`` has the value of each target of a `get_attr` or `call_module` node. ``balanced`` is True if a pass has
    placed the marks, or has decided that there are none. ``kept_whole`` has the reason for each module that the graph calls
    because it could not be traced; ``untraced`` is the whole error if the model itself is one of them. ``differing`` has
    the paths of modules that call something else in the other mode. ``reads`` has the attributes of modules that tracing
    has read, there or not: the class of the module, and the name.
    """

    model: nn.Module
    graph: fx.Graph
    attributes: dict[str, Any] = field(default_factory=dict)
    modes: ModelModes = field(default_factory=ModelModes)
    balanced: bool = False
    kept_whole: dict[str, str] = field(default_factory=dict)
    untraced: str = ""
    differing: set[str] = field(default_factory=set)
    reads: dict[tuple[type, str], bool] = field(default_factory=dict)
    _reached: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    def reached(self, node: fx.Node) -> list[torch.Tensor]:
        """The model's tensors that a node reaches by plain references, beside that which it gets, or those that its module has
        registered. Raises if it reaches one that cannot be followed."""
        target: Any = node.target
        if node.op in ("get_attr", "call_module", "call_function") and target not in self._reached:
            value = target if node.op == "call_function" else self.attributes[target]
            registered = named_state(value) if isinstance(value, nn.Module) else [("", value)]
            own = {id(tensor) for _, tensor in registered if id(tensor) in self.model_tensors.names}
            where = (
                f"{target} ({SOURCE.of(node)})" if node.op == "get_attr" else getattr(target, "__qualname__", target)
            )
            found = self.model_tensors.among(reached_by(value, str(where)), own, SharedParameterError)
            self._reached[target] = [each.value for each in found]
        return self._reached.get(target, [])

    @cached_property
    def model_tensors(self) -> ModelTensors:
        """The tensors of the model, as code may reach them."""
        return ModelTensors(self.model)

    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    def name_for_target(self) -> str:
        """What the target will be called, if there is a loss function."""
        return target_name([node.name for node in self.placeholders()])


class ValueName(str):
    """The name of a value, in a structure that may also contain constants."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Wiring:
    """``inputs`` are the placeholders, in order; ``outputs`` is what the model returns, each value as its name.

    ``values`` maps the name of each node of the top-level graph that is a value to the name of the value. A value has the
    name of its input, or of the node in its stage that makes it. The call of a stage with several outputs is no value;
    each of its `getitem` nodes is one.
    """

    inputs: tuple[str, ...]
    outputs: Any
    values: dict[str, str]


@dataclass(frozen=True)
class Loss:
    """The value of the top-level graph that is the loss, by its name, and the gradient that the backward starts from.

    The seed is `SEED` if the value is the loss. If the loss is inside the value, it is nested lists with a `SEED`.
    """

    value: str
    seed: Any = SEED


@dataclass(eq=False, repr=False, kw_only=True)
class Compiled(ModelCall):
    """A model cut into stages, as plain data. The passes fill it; drawings and drivers read it.

    ``split_gm`` is the top-level graph, which holds the stages. ``replicated_params`` has a dict for every replicated
    parameter, from the stages that hold a copy to the name in that stage; the first is the model's own. ``balance`` is the
    result of the ``cut`` of `Pipe.from_tracing`. ``seen_inputs`` has the inputs that each stage must not change in place:
    their numbers and names. ``kept_whole`` is that of the traced graph. ``row_sizes`` says of the values between stages, by
    their names, how they depend on the number of rows; ``value_bytes`` the bytes that they have for the example.
    ``without_gradient`` has the names of those that can have no gradient.
    """

    split_gm: PipeGraphModule
    qualnames: Qualnames
    replicated_params: list[dict[str, str]]
    wiring: Wiring
    modes: ModelModes
    loss: Loss | None = None
    balance: Any = None
    seen_inputs: dict[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    kept_whole: dict[str, str] = field(default_factory=dict)
    row_sizes: dict[str, Any] = field(default_factory=dict)
    value_bytes: dict[str, int] = field(default_factory=dict)
    without_gradient: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.split_gm.__dict__["replicated_params"] = self.replicated_params

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def num_stages(self) -> int:
        """How many stages the Pipe has; `_loss` is not one of them."""
        return sum(1 for _ in self.stages())

    def stages(self) -> Iterator[tuple[str, PipeGraphModule]]:
        """Every stage with its name, in order."""
        for name, module in self.split_gm.named_children():
            if name != LOSS:
                yield name, module  # type: ignore[misc]

    def stage(self, name: str | int) -> Any:
        """A stage by its name or number; `_loss` too, by its name."""
        wanted = stage_name(name) if isinstance(name, int) and name < self.num_stages else name
        if not isinstance(wanted, str) or wanted not in self.split_gm._modules:
            raise NameLookupError(f"the Pipe has no stage {brief(name)}; it has {', '.join(self.split_gm._modules)}")
        return self.split_gm._modules[wanted]

    @property
    def loss_module(self) -> Any:
        """The loss's module; None if the model returns its loss, or has none."""
        return self.split_gm._modules.get(LOSS)

    def stage_outputs(self, name: str) -> Any:
        """The node in a stage's graph that makes its output, or the tuple of them."""
        return self.stage(name).graph.output_node().args[0]

    def placeholders(self) -> list[fx.Node]:
        """The inputs of the top-level graph, in order."""
        return list(self.split_gm.graph.find_nodes(op="placeholder"))

    def remap_qualname(self, qualname: str) -> str:
        """The user's name of a parameter, buffer or module, from its name inside a stage.

        >>> from torch import nn
        >>> from pippy import Pipe
        >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> pipe.remap_qualname("submod_0.0.weight")
        '0.weight'
        """
        return self.qualnames.remap(qualname)

    def stage_qualnames(self, name: str) -> tuple[str, ...]:
        """The names in stages of the user's parameter or buffer, the inverse of `remap_qualname`; empty if no stage uses it.

        >>> from torch import nn
        >>> from pippy import Pipe
        >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> pipe.stage_qualnames("0.weight")
        ('submod_0.0.weight',)
        """
        return self.qualnames.locate(name)

    def copies(self) -> list[list[torch.Tensor]]:
        """The copies of each replicated parameter, in the order of `replicated_params`; the first is the model's own."""
        return [
            [get_tensor(self.stage(stage), name) for stage, name in group.items()] for group in self.replicated_params
        ]

    def get_grad(self, name: str) -> torch.Tensor | None:
        """The gradient of the parameter that the user calls ``name``."""
        places = self.stage_qualnames(name)
        return get_tensor(self.split_gm, places[0]).grad if places else None


def flat_inputs(call: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments of a call, in order. A node that is two arguments is in the list twice."""
    found: list[fx.Node] = []
    fx.node.map_arg(call.args, found.append)
    return found


def ancestors(loss: fx.Node) -> set[fx.Node]:
    """The nodes that the loss depends on, and the loss."""
    seen, pending = {loss}, [loss]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in seen:
                seen.add(node)
                pending.append(node)
    return seen


def output_items(call: fx.Node) -> dict[int, fx.Node]:
    """The `getitem` nodes of a call's outputs, by index; empty if the call has one output."""
    return {user.args[1]: user for user in call.users if is_getitem(user)}  # type: ignore[misc]


def is_getitem(node: fx.Node) -> bool:
    """Whether a node is a `getitem`."""
    return node.op == "call_function" and node.target is operator.getitem


def maker_of(compiled: Compiled, value: fx.Node) -> fx.Node | None:
    """The node inside a stage that makes a value of the top-level graph; None if no stage makes it."""
    call: Any = value.args[0] if is_getitem(value) else value
    if call.op != "call_module" or stage_index(str(call.target)) is None:
        return None
    made = compiled.stage_outputs(str(call.target))
    return made[value.args[1]] if is_getitem(value) else made


def in_backward_pass(node: fx.Node) -> bool:
    """Whether a node of the top-level graph belongs to the backward pass: a `stage_backward`, or what uses its gradients."""
    if is_getitem(node):
        return in_backward_pass(node.args[0])  # type: ignore[arg-type]
    return node.op == "call_function"


def forward_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of the top-level graph without its backward pass, in order."""
    return [node for node in graph.nodes if not in_backward_pass(node)]


def values_read(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node reads when it runs.

    A backward reads only gradients. The outputs and inputs of its stage are kept with the run of the stage.
    """
    if node.target is not stage_backward:
        return node.all_input_nodes
    found: list[fx.Node] = []
    fx.node.map_arg(node.kwargs["output_grads"], found.append)
    return found


def values_to_free(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The values that can be freed after each node: those that no later node reads, and its own if no node reads it."""
    last_reader: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last_reader[node] = node
        last_reader.update(dict.fromkeys(values_read(node), node))
    freed: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last_reader.items():
        freed.setdefault(reader, []).append(value)
    return freed


def walk(
    nodes: Iterable[fx.Node], value: Callable[[fx.Node], Any], values: dict[fx.Node, Any], frees: bool = False
) -> Any:
    """Give what a graph returns: ``value`` says of each node what it gives, and ``values`` has what earlier ones gave.

    With ``frees``, those are taken out that no later node reads.

    >>> graph = fx.symbolic_trace(lambda x, y: (x + y) * y).graph
    >>> values, given = {}, iter([2, 3])
    >>> walk(graph.nodes, lambda node: next(given, 15), values), len(values)
    (15, 4)
    """
    nodes = list(nodes)
    free_after = values_to_free(nodes) if frees else {}
    for node in nodes:
        if node.op == "output":
            return map_nodes(values.__getitem__, node.args[0])
        values[node] = value(node)
        for each in free_after.get(node, ()):
            del values[each]
    raise AssertionError("a graph ends in its output")


def seeded(output_grads: Any) -> Any:
    """The argument ``output_grads`` of a backward node, with `SEED` for None: in the graph, None means that the output is
    the loss. (A value that is None when the graph runs means that there is no gradient.)"""
    return SEED if output_grads is None else output_grads


def map_nodes(function: Callable[[fx.Node], Any], argument: Any) -> Any:
    """``argument`` with ``function(node)`` in place of each node.

    The containers are plain ones, since the user may get them; those of `fx.node.map_arg` are immutable.
    """
    return map_instances(fx.Node, function, argument)
