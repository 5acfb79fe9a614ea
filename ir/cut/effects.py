"""Which nodes change a tensor in place, and whose tensor that is.

Between stages a value is a copy: what one stage changes in place, no other stage sees. The plain model may rely on
seeing it; so every in-place operation is found before the model is cut.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

# Methods and functions whose result may share memory with their first tensor argument.
_VIEWS = frozenset(
    """T mT H mH data real imag __getitem__ getitem getattr adjoint alias as_strided atleast_1d atleast_2d atleast_3d
    bfloat16 bool broadcast_tensors broadcast_to char chunk conj contiguous cpu cuda detach detach_ diagonal double dsplit
    einsum expand expand_as flatten float half hsplit indices int long meshgrid moveaxis movedim mT narrow permute ravel
    requires_grad_ reshape select short split squeeze swapaxes swapdims t tensor_split to transpose type type_as unbind
    unflatten unfold unsqueeze values view view_as view_as_complex view_as_real vsplit
    alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout""".split()
)
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_SHAPE_ATTRIBUTES = frozenset(
    ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "itemsize", "nbytes")
)
_NOT_IN_PLACE = frozenset(("requires_grad_", "retain_grad_", "detach_"))
_OPERATORS = frozenset(
    f"i{name}" for name in "add and floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
)


@dataclass(frozen=True)
class Mutation:
    """``node`` changes ``target`` in place; ``root`` is the value whose memory that is."""

    node: fx.Node
    target: fx.Node
    root: fx.Node


def find_mutations(graph: fx.Graph, attributes: Mapping[str, Any]) -> tuple[list[Mutation], dict[fx.Node, fx.Node]]:
    """All in-place changes in program order, and for every node the root of the memory that it may share."""
    roots: dict[fx.Node, fx.Node] = {}
    mutations = []
    for node in graph.nodes:
        targets = list(_mutated(node, attributes))
        mutations += [Mutation(node, target, roots[target]) for target in targets]
        shared = targets[:1] if _returns_target(node, attributes) else []
        shared = shared or list(_viewed(node, attributes))
        roots[node] = roots[shared[0]] if shared else node
    return mutations, roots


def _returns_target(node: fx.Node, attributes: Mapping[str, Any]) -> bool:
    """An in-place operation gives back what it changed; a Sequential that only begins with one does not."""
    return node.op != "call_module" or not isinstance(attributes[str(node.target)], nn.Sequential)


def _mutated(node: fx.Node, attributes: Mapping[str, Any]) -> Iterator[fx.Node]:
    candidates: list[Any] = [node.kwargs.get("out")]
    if node.op == "call_method" and _is_in_place_name(str(node.target)):
        candidates.append(node.args[0])
    elif node.op == "call_module" and _begins_in_place(attributes[str(node.target)]):
        candidates.append(node.args[0] if node.args else next(iter(node.kwargs.values()), None))
    elif node.op == "call_function" and callable(node.target):
        candidates += _mutated_arguments(node.target, node.args, node.kwargs)
    for candidate in candidates:
        yield from (
            item
            for item in (candidate if isinstance(candidate, (tuple, list)) else (candidate,))
            if isinstance(item, fx.Node)
        )


def _begins_in_place(module: nn.Module) -> bool:
    """Whether a module changes its input: one with ``inplace=True``, or a Sequential that begins with such a one."""
    if type(module) is nn.Sequential and len(module):
        return _begins_in_place(module[0])
    return getattr(module, "inplace", False) is True


def _is_in_place_name(name: str) -> bool:
    if name.startswith("__") and name.endswith("__"):
        return name == "__setitem__" or name[2:-2] in _OPERATORS
    return name.endswith("_") and not name.startswith("_") and name not in _NOT_IN_PLACE


def _mutated_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    name = getattr(function, "__name__", "")
    if getattr(function, "__module__", "") in ("_operator", "operator"):
        return [args[0]] if function is operator.setitem or name in _OPERATORS else []
    if function in (F.batch_norm, F.instance_norm):
        bound = _bind(function, args, kwargs)
        updates = bound.get("training") or bound.get("use_input_stats")
        return [bound.get("running_mean"), bound.get("running_var")] if updates is not False else []
    if (name.endswith("_") and not name.startswith("_")) or _bind(function, args, kwargs).get("inplace") is True:
        return [args[0] if args else next(iter(kwargs.values()), None)]
    return []


def _bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
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


def _viewed(node: fx.Node, attributes: Mapping[str, Any]) -> Iterator[fx.Node]:
    if node.op == "call_module" and not isinstance(attributes[str(node.target)], _VIEW_MODULES):
        return
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op in ("call_method", "call_function") and name not in _VIEWS:
        return
    if name == "getattr" and node.args[1] in _SHAPE_ATTRIBUTES:
        return
    if node.op.startswith("call_"):
        flat = chain.from_iterable(arg if isinstance(arg, (tuple, list)) else (arg,) for arg in node.args)
        yield from [arg for arg in flat if isinstance(arg, fx.Node)][:1]
