"""`x is y` asks no object, so a stand-in cannot answer. A model is traced again with other things in place of stand-ins.

    supposed                                 in place of
    ───────────────────────────────────────────────────────────────────────────────────────────────────────
    known     the value itself               a dtype, a flag, a string that is known: `x.dtype is torch.half`
              the same stand-in              what an operation gives that returns its argument: `h.contiguous()`
    same      the stand-in of its argument   what an operation gives of which nothing is known
    inputs    the stand-in of the first      inputs that could be one object in another call
    nothing   None                           what a call gives of which nothing is known: `self.layer(x)`
    turn n    the n-th possible value        an attribute of which nothing is known: `x.dtype`, `x.grad`

What comes of it, if the graphs differ, is in `identities.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import EllipsisType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.node_notes import SOURCE
from pippy.ir.base.operations import is_in_place, name_of
from pippy.ir.base.trees import UNKNOWN
from pippy.ir.run.checkpointed_parts import is_begin, is_end
from pippy.ir.run.functions import CHECKS, check_same
from pippy.ir.trace.tracing_thread import then
from pippy.ir.trace.values import Values, fix_value

SINGLE = (bool, str, torch.dtype, torch.layout, torch.memory_format, type, Enum, FunctionType, EllipsisType)
"""The classes of values that exist once, as far as `is` tells."""
_FLAGS = """requires_grad is_leaf is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mkldnn is_mps is_xpu
    retains_grad training""".split()
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool)
# The values that an attribute of a tensor may have, of those that exist once.
POSSIBLE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_FLAGS, (True, False)),
    **dict.fromkeys(("grad", "grad_fn", "_base", "names"), (None,)),
    "dtype": _DTYPES,
    "layout": (torch.strided, torch.sparse_coo, torch.sparse_csr),
}
_KNOWN = ("torch", "pippy", "operator", "_operator", "builtins", "math")  # modules of functions that give no None


@dataclass(frozen=True)
class Supposition:
    """What a trace gives in place of stand-ins: rows of the table above. ``inputs`` and ``nothing`` have names."""

    known: bool = False
    same: bool = False
    inputs: frozenset[str] = frozenset()
    nothing: frozenset[str] = frozenset()
    turn: int | None = None

    def of_attribute(self, name: str) -> Any:
        """What an attribute is supposed to be of which nothing is known; `UNKNOWN` if there is nothing to suppose."""
        possible = () if self.turn is None else POSSIBLE.get(name, ())
        return possible[self.turn] if self.turn is not None and self.turn < len(possible) else UNKNOWN


@dataclass
class Asked:
    """What a trace has met that another could answer differently."""

    supposition: Supposition = field(default_factory=Supposition)
    attributes: set[str] = field(default_factory=set)
    proxies: dict[fx.Node, Any] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)  # that were given as themselves


def supposed_attribute(proxy: fx.Proxy, name: str) -> Any:
    """What an attribute of a proxy, of which nothing is known, is in this trace; `UNKNOWN` if it is a stand-in."""
    asked: Asked | None = proxy.tracer.__dict__.get("_asked")
    if asked is None:
        return UNKNOWN
    asked.attributes.add(name)
    return asked.supposition.of_attribute(name)


@contextmanager
def supposing(tracer: fx.Tracer, supposition: Supposition, values: Values) -> Iterator[Asked]:
    """A context in which ``tracer`` gives what is supposed."""
    asked = tracer.__dict__["_asked"] = Asked(supposition)
    try:
        with then(tracer, "create_proxy", partial(_instead, asked, values)):
            yield asked
    finally:
        del tracer.__dict__["_asked"]


def _instead(asked: Asked, values: Values, proxy: Any) -> Any:
    if not issubclass(type(proxy), fx.Proxy):
        return proxy
    node, supposition = proxy.node, asked.supposition
    asked.proxies[node] = proxy
    if is_of_pippy(node) or node.op in ("get_attr", "output"):
        return proxy
    if node.name in supposition.nothing:
        return None
    if supposition.known and is_single(node, values):
        if node.op == "placeholder":
            asked.inputs.append(node)
            return values.of(node)
        return fix_value(proxy)
    first = origin(node, supposition, values)
    if first is node:
        return proxy
    if supposition.known and not supposition.same and values.of(node) is not UNKNOWN and node.op != "placeholder":
        _check_is_same(node, first, proxy.tracer)
    return asked.proxies.get(first, proxy)


def is_of_pippy(node: fx.Node) -> bool:
    """Whether a node calls something that forward has not called: a check, or an edge of a checkpointed part."""
    return node.target in CHECKS or is_begin(node) or is_end(node)


def is_single(node: fx.Node, values: Values) -> bool:
    """Whether the value of a node is known, and exists once: `is` may find it."""
    if node.op not in ("placeholder", "call_function") or node.target in CHECKS or name_of(node.target) in _COMPARISONS:
        return False
    value = values.of(node)
    return value is not UNKNOWN and isinstance(value, SINGLE)


_COMPARISONS = frozenset("eq ne lt le gt ge not_ contains bool and_ or_ is_ is_not".split())


def _check_is_same(node: fx.Node, first: fx.Node, tracer: fx.Tracer) -> None:
    if is_in_place(node.target):
        return
    with tracer.graph.inserting_after(node):
        tracer.create_node("call_function", check_same, (node, first, str(SOURCE.of(node) or "")), {})


def origin(node: fx.Node, supposition: Supposition, values: Values) -> fx.Node:
    """The first node with the value of a node, as far as is known or supposed; the node itself if no other has it."""
    while (followed := _followed(node, supposition, values)) is not None:  # no recursion: a stage may be long
        node = followed
    if node.op == "placeholder":
        return _origin_of_input(node, supposition, values)
    value = values.of(node)
    if supposition.known and isinstance(value, torch.Tensor):
        for each in _sources(node):
            if values.of(each) is value:
                return origin(each, supposition, values)
    return node


def _followed(node: fx.Node, supposition: Supposition, values: Values) -> fx.Node | None:
    """The argument that an operation of which nothing is known is supposed to return."""
    if not supposition.same or node.op in ("placeholder", "output") or is_of_pippy(node):
        return None
    given = node.args[0] if node.args else None
    is_unknown = isinstance(given, fx.Node) and values.of(node) is UNKNOWN and values.of(given) is UNKNOWN
    return given if is_unknown else None  # type: ignore[return-value]


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose value an operation may give: its arguments, and those of the call that gave the tuple it takes apart."""
    found = list(node.all_input_nodes)
    return found + [each for given in found if name_of(node.target) == "getitem" for each in given.all_input_nodes]


def _origin_of_input(node: fx.Node, supposition: Supposition, values: Values) -> fx.Node:
    for each in node.graph.find_nodes(op="placeholder"):
        if each is node:
            break
        one = supposition.known and isinstance(values.of(node), torch.Tensor) and values.of(each) is values.of(node)
        if one or (supposition.inputs.issuperset((each.target, node.target)) and may_be_one(each, node, values)):
            return each
    return node


def may_be_one(node: fx.Node, other: fx.Node, values: Values) -> bool:
    """Whether two inputs could be one object."""
    pair = values.of(node), values.of(other)
    if UNKNOWN in pair:
        return pair[0] is pair[1]
    if not all(isinstance(each, torch.Tensor) for each in pair) or pair[0] is pair[1]:
        return False
    return bool(pair[0].shape == pair[1].shape and pair[0].dtype == pair[1].dtype)


def may_be_none(node: fx.Node, root: nn.Module) -> bool:
    """Whether what a node of a graph of ``root`` gives may be None, as far as is known."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return isinstance(module, nn.MultiheadAttention) or not type(module).__module__.startswith("torch.")
    if node.op == "call_method":
        return node.target == "__call__"  # of a method that tensors do not have, as the `get` of a dict
    if name_of(node.target) in ("getitem", "getattr"):
        container, index = node.args
        if name_of(node.target) == "getattr" and hasattr(torch.Tensor, str(index)):
            return False
        if isinstance(container, fx.Node):
            return (container.op == "placeholder" and isinstance(index, str | int)) or may_be_none(container, root)
    if node.target is torch.autograd.grad:
        return bool(node.kwargs.get("allow_unused")) and not node.kwargs.get("materialize_grads")
    module_name = getattr(node.target, "__module__", None) or "builtins"
    return node.op == "call_function" and module_name.partition(".")[0] not in _KNOWN
