"""From an exported program to a marked graph.

in the exported program                                   in the marked graph
──────────────────────────────────────────────────────────────────────────────────────────────────────────────
a placeholder for each parameter and buffer               get_attr of the user's name
a placeholder for each leaf of the arguments              a placeholder for each argument, and getitem
a placeholder for a constant tensor                       get_attr of `_tensor_constant0`, or of the model's attribute
kept(3, x)                                                call_module, an autograd function, or a mark
wrap_with_set_grad_enabled(False, body, x)                the nodes of the body, with ``no_grad`` in their meta
copy_(count, value) at the end: `self.count = value`      after the value is made and the old one read last; none, if it
                                                            is the buffer itself, as after `self.count += 1`
sym_size(x, 0), used far away                             the size of what it is used with, where that has it
_assert_tensor_metadata(x, …)                             nothing: the guards say so
the outputs in one flat tuple                             as the user's forward returns them
"""

import dataclasses
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.base.marks import pipe_split
from pippy.ir.base.names import first_names, named_state
from pippy.ir.base.trees import tensors
from pippy.ir.export.kept import MARK, KeptModule, kept
from pippy.ir.export.program import Program

_aten = torch.ops.aten
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_SILENT = (_aten._assert_tensor_metadata.default,)
_SAME = (_aten.detach_.default, _aten.lift_fresh.default)  # of a new constant, these give the tensor itself
_WITHOUT_EFFECT = (_aten.sym_size.int, _aten.slice.Tensor, _aten.select.int, operator.getitem, getattr)


def marked_graph(model: nn.Module, signature: inspect.Signature, program: Program) -> tuple[fx.Graph, dict[str, Any]]:
    """The graph, and the values of the names in it."""
    made = _Rebuilt(model, program)
    made.add_inputs(signature)
    made.add_nodes(program.exported.graph_module)
    made.add_output()
    made.clean()
    return made.graph, made.attributes


class _Rebuilt:
    """A graph that grows, node by node."""

    def __init__(self, model: nn.Module, program: Program) -> None:
        self.model, self.program = model, program
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.values: dict[fx.Node, Any] = {}  # by the nodes of the exported program
        self.meta: dict[str, Any] = {}  # of the node that is being rebuilt
        self._state = dict(named_state(model))
        self._first = first_names(model)
        self._modules = dict(model.named_modules())
        self._lifted: dict[fx.Node, str] = {}
        self._fetched: dict[str, fx.Node] = {}
        self._leaves: dict[fx.Node, tuple[fx.Node, Sequence[Any]]] = {}
        self._device = _only_device([*self._state.values(), *tensors(program.example)])

    # inputs

    def add_inputs(self, signature: inspect.Signature) -> None:
        exported = self.program.exported
        nodes = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
        specs = exported.graph_signature.input_specs
        leaves = iter(self._add_placeholders(signature))
        for spec in specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                leaf = next(leaves)
                if leaf is None:
                    self.values[node] = node.meta.get("val")
                else:
                    self._leaves[node] = leaf
            elif spec.target in self._state:
                self._lifted[node] = self._first[id(self._state[spec.target])]
            else:
                self._lifted[node] = self._constant(str(spec.target))

    def _add_placeholders(self, signature: inspect.Signature) -> list[tuple[fx.Node, Sequence[Any]] | None]:
        """A placeholder for each argument. Gives for each leaf its argument and the way there; for a constant, None."""
        found: dict[str, list[tuple[fx.Node, Sequence[Any]]]] = {}
        for name, parameter in signature.parameters.items():
            if name in self.program.constants or name not in self.program.inputs:
                continue
            stars = _STARS.get(parameter.kind, "")
            default = () if stars or parameter.default is parameter.empty else (parameter.default,)
            node = self.graph.create_node("placeholder", stars + name, default, name=name)
            found[name] = [(node, way) for way, _ in _pytree.tree_flatten_with_path(self.program.inputs[name])[0]]
        return [leaf for name in self.program.inputs for leaf in found.get(name, [None])]

    def _constant(self, target: str) -> str:
        value = self.program.exported.constants[target]
        own = _attribute(self.model, target)
        name = target if own is not None else f"_tensor_constant{len(self.attributes)}"
        self.attributes[name] = value if own is None else own
        return name

    def _value(self, node: fx.Node) -> Any:
        if node in self._lifted:
            return self._get(self._lifted[node])
        if node in self._leaves and node not in self.values:
            value, way = self._leaves[node]
            for step in way:
                value = self._item(value, step)
            self._note_tensor(value, node)
            self.values[node] = value
        return self.values[node]

    def _item(self, value: fx.Node, key: Any) -> fx.Node:
        if isinstance(key, _pytree.GetAttrKey):
            return self._add("call_function", getattr, (value, key.name))
        at = key.key if isinstance(key, _pytree.MappingKey) else key.idx
        return self._add("call_function", operator.getitem, (value, at))

    def _get(self, name: str) -> fx.Node:
        if name not in self._fetched:
            self.attributes.setdefault(name, self._state.get(name))
            self._fetched[name] = self._add("get_attr", name)
        return self._fetched[name]

    def _add(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs or {})
        node.meta.update(self.meta)
        return node

    # operations

    def add_nodes(self, body: fx.GraphModule) -> Any:
        """The nodes of a graph; gives what it returns."""
        for node in body.graph.nodes:
            if node.op == "output":
                return node.args[0]
            if node.op == "call_function":
                self._follow_meta(node)
                self.values[node] = self._rebuilt(body, node)
                if isinstance(self.values[node], fx.Node):
                    self._note_tensor(self.values[node], node)
        raise AssertionError("a graph ends in its output")

    def _note_tensor(self, made: fx.Node, node: fx.Node) -> None:
        """Note which values are tensors, and which operations name the device of the example: a stage may be on another."""
        if isinstance(node.meta.get("val"), torch.Tensor):
            made.meta["is_tensor"] = True
        if self._device is not None and self._device in _pytree.tree_leaves((made.args, made.kwargs)):
            made.meta["names_device"] = self._device

    def _follow_meta(self, node: fx.Node) -> None:
        if "scope" not in node.meta:  # a node that export adds afterwards
            self.meta = {**self.meta, "no_grad": False}
            return
        scope = node.meta["scope"]
        path = list(scope.values())[-1][0] if scope else ""
        self.meta = {"source": node.meta.get("source"), "module_path": path, "nn_module_stack": scope}
        if node.meta.get("no_grad"):
            self.meta["no_grad"] = True

    def _rebuilt(self, body: fx.GraphModule, node: fx.Node) -> Any:
        target = node.target
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            return self._inlined(body, node)
        if target in _SILENT:
            return None
        args, kwargs = self._mapped(node, node.args), self._mapped(node, node.kwargs)
        if target is kept:
            return self._kept_call(*args, **kwargs)
        if target is operator.getitem and isinstance(args[0], (tuple, list)):  # of an inlined region
            return args[0][args[1]]
        if target in _SAME:
            return args[0]
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise TracingError(
                f"forward calls {target.name()}, which a stage cannot run; call it in a module of its own, and keep that whole "
                f"with a tracer whose is_leaf_module says True for it:\n{self._excerpt()}"
            )
        return self._add("call_function", target, args, kwargs)

    def _excerpt(self) -> str:
        where: source.Source | None = self.meta.get("source")
        return where.excerpt() if where is not None else ""

    def _mapped(self, user: fx.Node, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, lambda node: self._near(user, node))

    def _near(self, user: fx.Node, node: fx.Node) -> Any:
        """A value as an argument of ``user``. A size is asked of another argument that has it, so that it need not travel."""
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt):
            for other in user.all_input_nodes:
                shape = getattr(other.meta.get("val"), "shape", ())
                for dim, each in enumerate(shape if not isinstance(size, torch.Tensor) else ()):
                    if isinstance(each, torch.SymInt) and each.node.expr == size.node.expr:
                        return self._add("call_function", _aten.sym_size.int, (self._value(other), dim))
        return self._value(node)

    def _inlined(self, body: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
        inner: Any = getattr(body, str(node.args[1].target))  # type: ignore[union-attr]
        for placeholder, given in zip(inner.graph.find_nodes(op="placeholder"), node.args[2:]):
            if isinstance(given, fx.Node) and given in self._lifted:
                self._lifted[placeholder] = self._lifted[given]
            elif isinstance(given, fx.Node):
                self.values[placeholder] = self._value(given)
        returned = self.add_nodes(inner)
        return tuple(fx.node.map_arg(list(returned), self._value))

    def _kept_call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        what = self.program.kept.calls[number]
        if what == MARK:
            return self._add("call_function", pipe_split)
        if isinstance(what, KeptModule):
            self.attributes[what.path] = self._modules[what.path]
            return self._add("call_module", what.path, args, kwargs)
        return self._add("call_function", what, args, kwargs)

    # the output

    def add_output(self) -> None:
        exported = self.program.exported
        flat = fx.node.map_arg(list(exported.graph.output_node().args[0]), self._value)
        count = exported.call_spec.out_spec.num_leaves
        self.graph.output(self._structured(exported.call_spec.out_spec, flat[len(flat) - count :]))

    def _structured(self, spec: Any, leaves: list[Any]) -> Any:
        """What a specification of torch's says, with ``leaves`` in it. A node calls a class, but not a plain container."""
        if spec.is_leaf():
            return leaves[0]
        items, at = [], 0
        for child in spec.children():
            items.append(self._structured(child, leaves[at : at + child.num_leaves]))
            at += child.num_leaves
        kind = spec.type
        if kind in (tuple, list):
            return kind(items)
        if kind is dict:
            return dict(zip(spec.context, items))
        if kind is torch.Size:
            return tuple(items)
        return self._made(spec, kind, items)

    def _made(self, spec: Any, kind: Any, items: list[Any]) -> fx.Node:
        if kind is _pytree.namedtuple:
            return self._add("call_function", spec.context, tuple(items))
        if dataclasses.is_dataclass(kind):
            names = spec.context[0] if spec.context and isinstance(spec.context[0], list) else spec.context
            return self._add("call_function", kind, (), dict(zip(names, items)))
        if isinstance(kind, type) and issubclass(kind, Mapping):
            return self._add("call_function", kind, (dict(zip(spec.context, items)),))
        raise TracingError(
            f"forward returns a {getattr(kind, '__name__', kind)}, which a stage cannot make; return the tensors in it, in a "
            "tuple, a list, a dict or a dataclass"
        )

    # what remains

    def clean(self) -> None:
        self._place_assignments()
        for node in reversed(list(self.graph.nodes)):
            pure = node.op == "get_attr" or node.target in _WITHOUT_EFFECT
            if pure and not node.users and node.op != "placeholder":
                self.graph.erase_node(node)
        used = {str(node.target) for node in self.graph.nodes if node.op in ("get_attr", "call_module")}
        self.attributes = {name: value for name, value in self.attributes.items() if name in used}

    def _place_assignments(self) -> None:
        """Move each `copy_` into a buffer from the end of the graph to where forward assigns the buffer."""
        order = {node: at for at, node in enumerate(self.graph.nodes)}
        for node in reversed(list(self.graph.find_nodes(op="call_function", target=_aten.copy_.default))):
            buffer, value = node.args
            if buffer.op != "get_attr" or node.users:
                continue
            if _is_itself(value, buffer):
                self.graph.erase_node(node)
                continue
            node.meta["no_grad"] = True
            readers = [value, *(user for user in buffer.users if user is not node and user.op != "output")]
            last = max((each for each in readers if isinstance(each, fx.Node)), key=order.__getitem__)
            last.append(node)


def _is_itself(value: Any, buffer: fx.Node) -> bool:
    """Whether a value is a buffer that in-place operations have changed."""
    while isinstance(value, fx.Node) and value is not buffer:
        schema = getattr(value.target, "_schema", None)
        if schema is None or not schema.name.endswith("_") or not value.args:
            return False
        value = value.args[0]
    return value is buffer


def _only_device(of: list[torch.Tensor]) -> torch.device | None:
    devices = {tensor.device for tensor in of}
    return devices.pop() if len(devices) == 1 else None


def with_defaults(graph: fx.Graph, other: fx.Graph) -> None:
    """Write out the arguments that a call of an operator leaves to their defaults in one of two graphs only."""
    for node, counterpart in zip(graph.nodes, other.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or node.target is not counterpart.target:
            continue
        by_name = [each for each in schema.arguments if each.kwarg_only]
        count = max(len(node.args), len(counterpart.args))
        names = {*node.kwargs, *counterpart.kwargs}
        for each in (node, counterpart):
            each.args = (*each.args, *(missing.default_value for missing in schema.arguments[len(each.args) : count]))
            given = {argument.name: argument.default_value for argument in by_name if argument.name in names}
            each.kwargs = {**given, **each.kwargs}


def _attribute(model: nn.Module, target: str) -> Any:
    try:
        return operator.attrgetter(target)(model)
    except AttributeError:
        return None
