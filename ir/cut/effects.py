"""Which nodes change a tensor in place, and whose tensor that is.

Between stages a value is a copy: what one stage changes in place, no other stage sees. The plain model may rely on
seeing it; so every in-place operation is found before the model is cut.

    what a node calls                        who says what it changes, and what its result may share memory with
    ─────────────────────────────────────    ───────────────────────────────────────────────────────────────────
    an operator of torch, also a method      its schemas: ``view(Tensor(a) self, …) -> Tensor(a)``; and _VIEWS_WITHOUT_SCHEMA
    another function of torch                ``inplace=True``, a name that ends with ``_``, and _VIEWS_WITHOUT_SCHEMA
    a function of the module `operator`      _OPERATORS
    a transformed function                   what its graph changes; nobody what its result shares
    a module of torch                        ``inplace=True``, and _VIEW_MODULES
    the end of a checkpointed part           its result is what the part returns
    anything else, a module of the user's    nobody: the result may be a view of every argument. What it changes is found
      own among them                           when it runs: see ir/run/given_inputs.py
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MethodDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.jit._builtins import _find_builtin
from torch.nn.utils.parametrize import type_before_parametrizations

from pippy.ir.batch_norm.deferred_batch_norm import DeferredBatchNorm
from pippy.ir.run.checkpointed_parts import is_begin, is_end
from pippy.ir.run.transformed_functions import TransformedFunction

# Operators and functions of torch that may return an argument or a view of it, of which no schema tells.
_VIEWS_WITHOUT_SCHEMA = frozenset(
    """atleast_1d atleast_2d atleast_3d broadcast_tensors cartesian_prod einsum histogramdd meshgrid sum_to_size type_as
    unsafe_chunk unsafe_split unsafe_split_with_sizes
    alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout""".split()
)
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_SHAPE_ATTRIBUTES = frozenset(
    ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "itemsize", "nbytes")
)
_NOT_IN_PLACE = frozenset(("requires_grad_", "retain_grad", "retain_grad_", "detach_"))  # they change no number
_OPERATORS = frozenset(
    f"i{name}" for name in "add and floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
)
_NORMS_OF_ATEN = (
    torch.ops.aten.batch_norm.default,
    torch.ops.aten.instance_norm.default,
)  # no schema tells what these change

Roots = dict[fx.Node, tuple[fx.Node, ...]]


@dataclass(frozen=True)
class Mutation:
    """``node`` changes ``target`` in place; ``root`` is a value whose memory that may be."""

    node: fx.Node
    target: fx.Node
    root: fx.Node


@dataclass(frozen=True)
class _Effect:
    """The arguments that a call changes in place, and those whose memory its result may share."""

    changed: Sequence[Any] = ()
    shared: Sequence[Any] = ()


def find_mutations(graph: fx.Graph, attributes: Mapping[str, Any]) -> tuple[list[Mutation], Roots]:
    """All in-place changes in program order, and for every node the values whose memory it may share: itself, if none."""
    roots: Roots = {}
    mutations = []
    for node in graph.nodes:
        effect = _effect(node, attributes)
        mutations += [Mutation(node, target, root) for target in _nodes(effect.changed) for root in roots[target]]
        views = [each for each in _nodes(effect.shared) if not _is_no_tensor(each, attributes)]
        shared = dict.fromkeys(root for each in views for root in roots[each])
        roots[node] = tuple(shared) or (node,)
    return mutations, roots


def _nodes(arguments: Sequence[Any]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(tuple(arguments), lambda node: found.setdefault(node))
    return list(found)


def _is_no_tensor(node: fx.Node, attributes: Mapping[str, Any]) -> bool:
    return node.op == "get_attr" and not isinstance(attributes[str(node.target)], torch.Tensor)


def _effect(node: fx.Node, attributes: Mapping[str, Any]) -> _Effect:
    if is_begin(node) or is_end(node):
        return _Effect([], node.args[1:] if is_end(node) else [])
    if node.op == "call_module":
        return _of_module(attributes[str(node.target)], [*node.args, *node.kwargs.values()], attributes)
    if node.op == "call_method":
        return _of_method(str(node.target), node.args, node.kwargs)
    if node.op == "call_function" and callable(node.target):
        return _of_function(node.target, node.args, node.kwargs, attributes)
    return _Effect()


def _of_module(module: nn.Module, given: list[Any], attributes: Mapping[str, Any]) -> _Effect:
    changed = given[:1] if _begins_in_place(module) else []
    if _is_of_torch(module):
        return _Effect(changed, given[:1] if _passes_on(module) else [])
    tensors = [each for each in _nodes(given) if each.op != "get_attr" or _is_no_tensor(each, attributes)]
    return _Effect(changed, [*changed, *tensors])


def _is_of_torch(module: nn.Module) -> bool:
    """Whether all code of a module is torch's, so that it is known what it does, or acts as that does."""
    kind = type_before_parametrizations(module)
    if kind is DeferredBatchNorm:
        return True
    return kind.__module__.startswith(("torch.nn.", "torch.ao.")) and (
        not isinstance(module, nn.Sequential) or all(map(_is_of_torch, module))
    )


def _passes_on(module: nn.Module) -> bool:
    """Whether a module of torch may return its input, or a view of it."""
    if isinstance(module, nn.Sequential):
        return all(map(_passes_on, module))
    return isinstance(module, _VIEW_MODULES) or _begins_in_place(module)


def _begins_in_place(module: nn.Module) -> bool:
    """Whether a module changes its input: one with ``inplace=True``, or a Sequential that begins with such a one."""
    if type(module) is nn.Sequential and len(module):
        return _begins_in_place(module[0])
    return getattr(module, "inplace", False) is True


def _of_method(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Effect:
    if name.startswith("__") and name.endswith("__"):
        return _of_operator(name[2:-2], args)
    return _of_schemas(name, args, kwargs, _overloads(name)) or _unknown(name, args, kwargs)


def _of_operator(name: str, args: Sequence[Any]) -> _Effect:
    changes = name == "setitem" or name in _OPERATORS
    return _Effect(args[:1] if changes else [], args[:1] if changes or name in ("getitem", "pos") else [])


def _of_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], attributes: Mapping[str, Any]
) -> _Effect:
    if isinstance(function, TransformedFunction):
        return _Effect(_changed_by_transformed(function, args), args)
    name, module = _name_of(function), getattr(function, "__module__", None) or ""
    if module in ("_operator", "operator"):
        return _of_operator(name, args)
    if function is getattr:
        return _Effect([], [] if args[1] in _SHAPE_ATTRIBUTES else args[:1])
    if function in (F.batch_norm, F.instance_norm, *_NORMS_OF_ATEN):
        bound = _bind(function, args, kwargs)
        updates = bound.get("training") or bound.get("use_input_stats")
        return _Effect([bound.get("running_mean"), bound.get("running_var")] if updates is not False else [])
    if _bind(function, args, kwargs).get("inplace") is True:
        given = [*args, *kwargs.values()][:1]
        return _Effect(given, given)
    overloads = _overloads(name if isinstance(function, MethodDescriptorType) else function)
    effect = _of_schemas(name, args, kwargs, overloads)
    if effect is not None:
        return effect
    if module.partition(".")[0] == "torch":
        given = [*args, *kwargs.values()]
        changed = given[:1] if _is_in_place_name(name) else []
        return _Effect([*changed, kwargs.get("out")], given if name in _VIEWS_WITHOUT_SCHEMA else changed)
    if module in ("builtins", "math"):
        return _Effect()
    effect = _unknown(name, args, kwargs)
    return _Effect(effect.changed, [each for each in _nodes(effect.shared) if not _is_parameter(each, attributes)])


def _changed_by_transformed(function: TransformedFunction, args: Sequence[Any]) -> list[Any]:
    """The arguments that the graph of a transformed function changes in place: all that it is mapped over, or captured ones."""
    graph = function.module.graph
    changed = {change.root for change in find_mutations(graph, {})[0]}
    given, captured = args[:2], args[2]
    inputs = graph.find_nodes(op="placeholder")
    return [
        given if at < len(function.places) else captured[at - len(function.places)]
        for at, node in enumerate(inputs)
        if node in changed
    ]


def _name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name.partition("::")[2]
    return getattr(function, "__name__", "")


def _is_parameter(node: fx.Node, attributes: Mapping[str, Any]) -> bool:
    """Whether a node gets a parameter. None is changed through an unknown function's view of it: autograd forbids that."""
    return node.op == "get_attr" and isinstance(attributes[str(node.target)], nn.Parameter)


def _unknown(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Effect:
    """What has no schema changes what its name says, and may return a view of everything."""
    given = [*args, *kwargs.values()]
    return _Effect(given[:1] if _is_in_place_name(name) else [], given)


def _is_in_place_name(name: str) -> bool:
    of_lists = name.startswith("_foreach_")
    return name.endswith("_") and (of_lists or not name.startswith("_")) and name not in _NOT_IN_PLACE


@dataclass(frozen=True)
class _Argument:
    """What a schema says of one argument."""

    name: str
    kwarg_only: bool
    changed: bool
    shared: bool


_Overload = tuple[_Argument, ...]


def _of_schemas(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], overloads: Sequence[_Overload]
) -> _Effect | None:
    """What any of the overloads says; None if there is none."""
    if not overloads:
        return None
    changed, shared = [], [args, *kwargs.values()] if name in _VIEWS_WITHOUT_SCHEMA else []
    for overload in overloads:
        for argument, value in _bound(overload, args, kwargs):
            changed += [value] if argument.changed and name not in _NOT_IN_PLACE else []
            shared += [value] if argument.shared else []
    return _Effect(changed, shared)


def _bound(overload: _Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[_Argument, Any]]:
    yield from zip((each for each in overload if not each.kwarg_only), args)
    for name, value in kwargs.items():
        found = next((each for each in overload if each.name == name), None)
        if found is not None:
            yield found, value
        elif name in ("input", "tensor"):  # what Python calls the argument that a schema calls self
            yield overload[0], value


@cache
def _overloads(function: Any) -> tuple[_Overload, ...]:
    """The overloads of an operator, or of a method by its name, that take a tensor or several first."""
    if isinstance(function, torch._ops.OpOverload):
        schemas = [function._schema]
    elif isinstance(function, torch._ops.OpOverloadPacket):
        schemas = [getattr(function, overload)._schema for overload in function.overloads()]
    else:
        name = f"aten::{function}" if isinstance(function, str) else _find_builtin(function)
        schemas = torch._C._jit_get_schemas_for_operator(name) if name else []
    by_type: dict[str, list[_Overload]] = {}
    for schema in schemas:
        if schema.arguments:
            by_type.setdefault(str(schema.arguments[0].type), []).append(_arguments(schema))
    of_tensors = [*by_type.get("Tensor", []), *by_type.get("Optional[Tensor]", [])]
    # Beside an operator on a tensor, one on a list of tensors is of TorchScript: `sort`, say, which sorts the list.
    return tuple(of_tensors or by_type.get("List[Tensor]", []))


def _arguments(schema: torch.FunctionSchema) -> _Overload:
    returns_alias = any(result.alias_info for result in schema.returns)
    return tuple(
        _Argument(
            each.name,
            each.kwarg_only,
            changed=each.alias_info is not None and each.alias_info.is_write,
            shared=each.alias_info is not None and returns_alias,
        )
        for each in schema.arguments
    )


def _bind(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(function, torch._ops.OpOverload):
        return {**{each.name: given for each, given in zip(function._schema.arguments, args)}, **kwargs}
    signature = _signature(function)
    if signature is None:
        return dict(kwargs)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return dict(kwargs)
    bound.apply_defaults()
    return bound.arguments


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # most functions written in C
        return None
