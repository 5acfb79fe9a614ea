"""The graph modules of a Pipe: its stages and its top level.

They pickle as a flat list of nodes. A graph module of torch pickles its generated code, and traces that again when it is
loaded: this loses source lines, folds constants and cannot call `stage_backward`. To pickle the nodes themselves, which
refer to one another, would recurse once per node.
"""

import copyreg
import importlib
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.errors import StageError
from pippy.ir.base.names import local_name
from pippy.ir.base.node_notes import place_of, put_place
from pippy.ir.run.checkpointed_parts import BeginPart, Part, end_part, parts_of
from pippy.ir.run.copies import owners_in_place_of_copies
from pippy.ir.run.functions import OF_STAGES
from pippy.ir.run.random_state import draw_key, seed_draws
from pippy.ir.run.stage_backward import stage_backward

_STATE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")
# Of the file of a line that `check_fixed` names. It is looked for behind quotes only: long code has few of them.
_FOLDERS = re.compile(r"(?<=['\"])[^'\"\n]*[/\\](?=[^'\"/\\]+:\d+, in [\w<>]+['\"][,)])")
_OURS = (*OF_STAGES, draw_key, seed_draws, stage_backward)  # graphs call these


class PipeGraphModule(fx.GraphModule):
    """A graph module that prints as text and pickles as data.

    Called, it computes with the model's own parameters where its stages hold copies. (Those who run stages call the stages
    themselves.)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        groups: Sequence[Mapping[str, str]] = self.__dict__.get("replicated_params", ())
        with owners_in_place_of_copies(groups, self.get_submodule):
            return super().__call__(*args, **kwargs)

    def recompile(self) -> Any:
        if not self._graph.nodes:  # of `empty_graph_module`: a graph with nodes comes later
            return None
        if not self._graph.find_nodes(op="call_function", target=end_part):
            return super().recompile()
        with self._graph.on_generate_code(lambda _: partial(with_parts_as_functions, list(self._graph.nodes))):
            return super().recompile()

    def _recompile_submodules(self) -> list[Any]:
        """Whenever the top level changes, torch would generate the code of all stages again. They have it with their graphs."""
        return []

    def __str__(self) -> str:
        return f"{nn.Module.__repr__(self)}\n\n{readable_code(self)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (flat_graph(self.graph), {name: self.__dict__[name] for name in _STATE})


def readable_code(module: fx.GraphModule) -> str:
    """The generated code, with short names for the functions that pippy itself puts there, and for the files of lines."""
    code = module.code.strip()
    for function in _OURS:
        code = code.replace(f"{function.__module__}.{function.__name__}".replace(".", "_"), function.__name__)
    return _FOLDERS.sub("", code) + "\n"


def empty_graph_module() -> PipeGraphModule:
    """A graph module without nodes, to be given attributes and then a graph."""
    return PipeGraphModule(nn.Module(), fx.Graph())


def _rebuild(flat: list[tuple[Any, ...]], state: dict[str, Any]) -> PipeGraphModule:
    module = empty_graph_module()
    module.__dict__.update(state)
    module.graph = unflatten_graph(flat)
    return module


class _Ref(str):
    """A reference to a node, by its name, in the arguments of another."""

    __slots__ = ()


def flat_graph(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """A graph as a list of plain tuples, one for each node, in order."""
    return [
        (
            node.op,
            node.name,
            _portable(node.target) if node.op == "call_function" else node.target,
            fx.node.map_arg(node.args, lambda arg: _Ref(arg.name)),
            fx.node.map_arg(node.kwargs, lambda arg: _Ref(arg.name)),
            place_of(node),
        )
        for node in graph.nodes
    ]


def unflatten_graph(flat: list[tuple[Any, ...]]) -> fx.Graph:
    """The graph that `flat_graph` wrote."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs, place in flat:
        resolved = target.resolve() if isinstance(target, _Named) else target
        args, kwargs = fx.node.map_aggregate((args, kwargs), partial(_resolved, nodes))
        node = graph.create_node(op, resolved, args, kwargs, name)
        put_place(node, place)
        nodes[name] = node
    return graph


def _resolved(nodes: Mapping[str, fx.Node], argument: Any) -> Any:
    return nodes[str(argument)] if isinstance(argument, _Ref) else argument


class _Named:
    """The module and the name of a function that pickle cannot find by itself."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def resolve(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module), self.name)


def _operator(name: str, overload: str | None) -> Any:
    """An operator of torch by its name, `aten::add`, and that of its overload, if it is one."""
    namespace, _, own = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), own, None)
    if packet is None:
        raise StageError(
            f"the operator {name} is defined in the script, and not in this process. What to do: define it by "
            "torch.library.custom_op, which travels"
        )
    return packet if overload is None else getattr(packet, overload)


# torch does not say how to pickle them. Graphs of `torch.export` call them; a selective checkpoint has those that it keeps.
copyreg.pickle(torch._ops.OpOverload, lambda each: (_operator, (each._schema.name, each._overloadname)))
copyreg.pickle(torch._ops.OpOverloadPacket, lambda each: (_operator, (each._qualified_op_name, None)))


def _portable(function: Callable[..., Any]) -> Any:
    if isinstance(function, torch._ops.OpOverload):
        return function
    try:
        pickle.dumps(function)
    except Exception:  # pickle has no one error for what it cannot write
        name = getattr(function, "__name__", "")
        for module in (getattr(function, "__module__", None), "torch", "torch._C._nn", "torch.nn.functional"):
            if module and getattr(sys.modules.get(module), name, None) is function:
                return _Named(module, name)
    return function


def install(module: nn.Module, name: str, value: Any, original: nn.Module, persistent: bool = True) -> None:
    """Set a module, tensor or training flag in ``module``, under the user's qualified name ``name``.

    The modules on the path to it are made as plain `nn.Module`s, with the training flags that they have in ``original``.
    """
    *path, leaf = local_name(name).split(".")
    holder, users_holder = module, original
    for step, atom in zip(name.split("."), path):
        users_holder = getattr(users_holder, step, users_holder)
        if atom not in holder._modules:
            holder.add_module(atom, nn.Module())
            holder._modules[atom].training = users_holder.training  # type: ignore[union-attr]
        holder = holder._modules[atom]  # type: ignore[assignment]
    _assign(holder, leaf, value, persistent)


def _assign(holder: nn.Module, name: str, value: Any, persistent: bool) -> None:
    if getattr(holder, name, None) is value:
        return
    if isinstance(value, nn.Module):
        holder.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        holder.register_parameter(name, value)
    elif isinstance(value, torch.Tensor):
        if name not in holder._buffers:
            holder.register_buffer(name, value, persistent)
    elif name != "training" and not hasattr(holder, name):
        setattr(holder, name, value)


# The code of a graph with checkpointed parts: each part is a function, which `torch.utils.checkpoint` calls.
#
# torch.fx writes a line for each node. What lies between the two nodes of a part becomes the body of a function:
#
#     def part(x, *, mask = mask):                       the arguments of the call, and what else the part uses from outside
#         linear = self.linear(x);  x = None
#         add = linear + mask;  linear = mask = None
#         return add
#     add = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False);  part = x = mask = None
#
# What the part uses from outside is bound where the function is made: what has that name later may be another value.


_COUNTER = re.compile(r"# COUNTER: (\d+)")  # torch.fx writes one before the code of each node, and removes it later
_CALLED = re.compile(r"= ([\w.]+)\(")


def with_parts_as_functions(nodes: Sequence[fx.Node], body: Sequence[str]) -> list[str]:
    """The code of ``nodes`` as torch.fx writes it, with a function for each checkpointed part."""
    lines: list[list[str]] = [[] for _ in nodes]
    at = 0
    for line in body:
        counter = _COUNTER.match(line)
        at = int(counter[1]) if counter else at
        lines[at].append(line)
    return list(_Writer(nodes, lines).all(0, len(nodes)))


class _Writer:
    def __init__(self, nodes: Sequence[fx.Node], lines: Sequence[Sequence[str]]) -> None:
        self.nodes, self.lines = nodes, lines
        self.order = {node: index for index, node in enumerate(nodes)}
        self.parts = {part.begin: part for part in parts_of(nodes)}

    def all(self, first: int, end: int) -> Iterator[str]:
        at = first
        while at < end:
            part = self.parts.get(self.nodes[at])
            if part is None:
                yield "".join(self.lines[at])
                at += 1
            else:
                yield from self._function(part)
                yield from self._call(part)
                at = self.order[part.end] + 1

    def _function(self, part: Part) -> Iterator[str]:
        captured = [f"{value} = {value}" for value in part.captured()]
        parameters = [*map(str, part.inputs), *(["*"] if captured else []), *captured]
        yield from self._counter(part.begin)
        yield f"def {part.begin}({', '.join(parameters)}):\n"
        for code in self.all(self.order[part.begin] + 1, self.order[part.end]):
            yield "".join(f"    {line}\n" for line in code.splitlines())
        yield from self._counter(part.end)
        yield f"    return {part.end.args[1]!r}\n" if part.is_reentrant else f"    return {_joined(part.outputs())}\n"

    def _call(self, part: Part) -> Iterator[str]:
        options = [f"{name}={value!r}" for name, value in part.begin.kwargs.items()]
        if isinstance(part.begin.target, BeginPart):
            written = _CALLED.search("".join(self.lines[self.order[part.begin]]))
            assert written is not None
            options.append(f"context_fn={written[1]}.context_fn")
        results = [part.end] if part.is_reentrant else part.outputs()
        arguments = ", ".join([str(part.begin), *map(str, part.inputs), *options])
        free = " = ".join([str(part.begin), *map(str, self._last_used_in(part)), "None"])
        yield f"{f'{_joined(results)} = ' if results else ''}torch.utils.checkpoint.checkpoint({arguments});  {free}\n"

    def _last_used_in(self, part: Part) -> Iterator[fx.Node]:
        given = dict.fromkeys([*part.begin.all_input_nodes, *part.captured()])
        end = self.order[part.end]
        yield from (value for value in given if all(self.order[user] <= end for user in value.users))

    def _counter(self, node: fx.Node) -> Iterator[str]:
        yield f"# COUNTER: {self.order[node]}\n"


def _joined(nodes: Sequence[fx.Node]) -> str:
    return ", ".join(map(str, nodes)) or "None"
