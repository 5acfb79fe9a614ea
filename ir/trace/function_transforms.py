"""Records calls of functions that `torch.func` has transformed as nodes: see `transformed_functions.py`.

While the function is traced, the tracer's graph is that of the function, and a value from outside becomes an input of it:

    torch.vmap(lambda row: self.layer(row) * y)(x)

    graph of the model         graph of the function
    ───────────────────        ────────────────────────────────────────────
    x, y                       row
    weight = layer.weight      weight, y                 captured
    bias = layer.bias          linear = F.linear(row, weight, bias), ...
    vmap = vmap((x,), {}, (weight, bias, y))

Modules are traced through, as their parameters are to be captured. What is not followed is refused; a submodule in whose
forward that happens is kept whole.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx
from torch._functorch import apis, eager_transforms
from torch.utils import _pytree

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.base.marks import pipe_split
from pippy.ir.run.functions import check_fixed
from pippy.ir.run.transformed_functions import TransformedFunction, call_transformed
from pippy.ir.trace.refusals import refused
from pippy.ir.trace.replaced import replaced
from pippy.ir.trace.tracing_thread import patched_here
from pippy.ir.trace.values import UNKNOWN, Values

_torchs: Any = eager_transforms
_apis: Any = apis
_MAKERS = {function.__code__: function for function in (_torchs.jacrev, _torchs.jacfwd)}
"""The transforms that compute on what they are given, and so are replaced when they are made."""
_OPTIONS = ("argnums", "has_aux", "chunk_size", "randomness")
_ADVICE = (
    "What to do: move the lines that make and call the transformed function into the forward of a module of its own, without "
    "a mark inside, and call that: it is called as a whole"
)


@contextmanager
def recording_transforms(tracer: fx.Tracer) -> Iterator[None]:
    """A context in which ``tracer`` makes a node of each call of a transformed function."""
    recorder = _Recorder(tracer)

    def vmap(
        function: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        options = {"in_dims": in_dims, "out_dims": out_dims, "randomness": randomness, "chunk_size": chunk_size}
        return recorder.record("vmap", options, function, args, kwargs)

    def grad(function: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
        return recorder.record("grad", {"argnums": argnums, "has_aux": has_aux}, function, args, kwargs)

    def grad_and_value(function: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
        return recorder.record("grad_and_value", {"argnums": argnums, "has_aux": has_aux}, function, args, kwargs)

    def jvp(
        function: Any, primals: Any, tangents: Any, argnums: Any, strict: bool = False, has_aux: bool = False
    ) -> Any:
        if argnums is not None:
            _refuse("torch.func.jacfwd was called outside of forward; call it in forward, and it is followed")
        options = {"strict": strict, "has_aux": has_aux}
        return recorder.record("jvp", options, function, (primals, tangents), {}, function_args=primals)

    def vjp(*_: Any, argnums: Any = None, **__: Any) -> NoReturn:
        if argnums is not None:
            _refuse("torch.func.jacrev was called outside of forward; call it in forward, and it is followed")
        _refuse("torch.func.vjp returns a function, which is not traced")

    def wraps(function: Any) -> Callable[[Any], Any]:
        frame = sys._getframe(2)  # behind that of the patch
        maker = _MAKERS.get(frame.f_code)
        if maker is None:
            return _wraps(function)
        options = {name: value for name, value in frame.f_locals.items() if name in _OPTIONS}

        def wrapped(*args: Any) -> Any:
            return recorder.record(maker.__name__, options, function, args, {})

        return lambda _: _wraps(function)(wrapped)

    _wraps = _torchs._wraps_without_dynamo_attrs
    with ExitStack() as stack:
        for owner, replacement in (
            (_apis, {"vmap_impl": vmap}),
            (_torchs, {"grad_impl": grad, "grad_and_value_impl": grad_and_value}),
            (_torchs, {"_jvp_with_argnums": jvp, "_vjp_with_argnums": vjp, "_wraps_without_dynamo_attrs": wraps}),
        ):
            for name, function in replacement.items():
                stack.enter_context(patched_here(owner, name, function))
        stack.enter_context(replaced(tracer, "create_node", recorder.creating(tracer.create_node)))
        yield


def is_in_function(tracer: fx.Tracer) -> bool:
    """Whether a function that is transformed is being traced."""
    return bool(tracer.__dict__.get("_functions"))


def _refuse(what: str) -> NoReturn:
    where = source.of_frame(sys._getframe(2))
    lines = [what, *([where.excerpt()] if where else []), _ADVICE]
    raise refused(TracingError("\n".join(lines)))


class _Captured(Exception):
    """Ends a call of a transformed function when it is known what the function is given."""


@dataclass
class _Function:
    """A function that is traced: its graph, and its inputs for values from outside."""

    name: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    captured: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _Recorder:
    """Traces functions into graphs of their own, one inside of another."""

    def __init__(self, tracer: fx.Tracer) -> None:
        self.tracer = tracer
        self.functions: list[_Function] = []  # that are traced now, the innermost last
        self.models: Any = None  # the graph of the model, once a function was met

    def record(
        self,
        transform: str,
        options: Mapping[str, Any],
        function: Any,
        args: Any,
        kwargs: Any,
        function_args: Any = None,
    ) -> Any:
        """Make a node of a call. The function gets ``function_args`` if that is not what the transformed one gets."""
        inside = (args if function_args is None else tuple(function_args), dict(kwargs))
        leaves, spec = _pytree.tree_flatten(inside)
        places = [place for place, leaf in enumerate(leaves) if _is_value(leaf)]
        seen = self._seen(transform, options, args, kwargs, len(leaves))
        traced = _Function(transform)
        with self._tracing(traced):
            for place in places:
                leaves[place] = self.tracer.proxy(self._input(traced, seen[place]))
            args_inside, kwargs_inside = _pytree.tree_unflatten(leaves, spec)
            result = self._own(self.tracer.create_arg(function(*args_inside, **kwargs_inside)))
            traced.graph.output(result)
        captured = tuple(map(self.tracer.proxy, traced.captured))
        numbers = _pytree.tree_unflatten(range(len(leaves)), spec)
        call = TransformedFunction(transform, options, traced.graph, numbers, places)
        proxy: Any = self.tracer.create_proxy("call_function", call, (tuple(args), dict(kwargs), captured), {})
        length = _length(transform, options, result)
        return proxy if length is None else tuple([proxy[index] for index in range(length)])

    @contextmanager
    def _tracing(self, function: _Function) -> Iterator[None]:
        before = self.tracer.graph
        self.models = before if not self.functions else self.models
        self.tracer.__dict__["_functions"] = self.functions
        self.functions.append(function)
        try:
            self.tracer.graph = function.graph
            with replaced(self.tracer, "is_leaf_module", _is_no_leaf), torch.enable_grad():
                yield
        finally:
            self.functions.pop()
            self.tracer.graph = before

    def _input(self, function: _Function, value: Any, name: str = "given") -> fx.Node:
        last = function.graph.find_nodes(op="placeholder")[-1:]
        with function.graph.inserting_after(last[0]) if last else function.graph.inserting_before():
            node = function.graph.placeholder(f"{name}_{len(function.graph.nodes)}")
        if (values := _values(self.tracer)) is not None:
            values.know(node, value)
        return node

    def _seen(self, transform: str, options: Mapping[str, Any], args: Any, kwargs: Any, count: int) -> list[Any]:
        """What is known of the leaves that the function is given: the transform itself is called, up to that."""
        values, captured = _values(self.tracer), list[Any]()
        if values is None or not values.example:
            return [UNKNOWN] * count

        def function(*args: Any, **kwargs: Any) -> NoReturn:
            leaves = _pytree.tree_leaves((args, kwargs))
            captured.extend(
                (each.shape, each.dtype, each.device) if isinstance(each, torch.Tensor) else each for each in leaves
            )
            raise _Captured

        def call(args: Any, kwargs: Any) -> list[Any]:
            with suppress(_Captured):
                call_transformed(transform, options, function, args, kwargs)
            return [
                torch.empty(each[0], dtype=each[1], device=each[2]) if _is_described(each) else each
                for each in captured
            ]

        seen = values.computed(call, *(self.tracer.create_arg(each) for each in (tuple(args), dict(kwargs))))
        return seen if isinstance(seen, list) and len(seen) == count else [UNKNOWN] * count

    def creating(self, create_node: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
        """`create_node` of the tracer, where a node may be one of a function that is traced."""

        def create(kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
            if self.models is None:
                return create_node(kind, target, args, kwargs, *rest, **options)
            if kind == "get_attr":  # the model's: no transform acts on it
                return self._in(self.models, create_node, kind, target, args, kwargs, *rest, **options)
            if target is check_fixed:  # it stands where the value is made
                return self._in(args[0].graph, create_node, kind, target, args, kwargs, *rest, **options)
            if self.functions:
                self._check(kind, target)
            return create_node(kind, target, self._own(args), self._own(kwargs), *rest, **options)

        return create

    def _in(self, graph: fx.Graph, create_node: Callable[..., fx.Node], *args: Any, **kwargs: Any) -> fx.Node:
        before, self.tracer.graph = self.tracer.graph, graph
        try:
            return create_node(*args, **kwargs)
        finally:
            self.tracer.graph = before

    def _check(self, kind: str, target: Any) -> None:
        within = f"inside of a function that torch.func.{self.functions[-1].name} calls"
        if kind == "call_module":
            _refuse(f"{target!r} cannot be traced through {within}")
        if target is pipe_split:
            _refuse(f"pipe_split() is called {within}, which is in one stage")
        if kind == "call_function" and getattr(target, "__name__", "") == "begin_part":
            _refuse(f"torch.utils.checkpoint is called {within}")
        if not torch.is_grad_enabled():
            _refuse(f"torch.no_grad() is entered {within}")

    def _own(self, argument: Any) -> Any:
        """``argument`` with values from outside replaced by inputs of the function that is traced."""
        return fx.node.map_arg(argument, lambda node: self._own_node(node, len(self.functions)))

    def _own_node(self, node: fx.Node, depth: int) -> fx.Node:
        graphs = [self.models, *(function.graph for function in self.functions[:depth])]
        if node.graph is graphs[-1]:
            return node
        if not any(node.graph is graph for graph in graphs):
            _refuse("a value that a transformed function computes is used outside without being returned")
        function = self.functions[depth - 1]
        if node not in function.captured:
            values = _values(self.tracer)
            function.captured[node] = self._input(function, UNKNOWN if values is None else values.of(node), node.name)
        return function.captured[node]


def _length(transform: str, options: Mapping[str, Any], result: Any) -> int | None:
    """The length of the tuple that a call returns; None if it returns something else, for all that is known."""
    if transform in ("grad_and_value", "jvp"):
        return 3 if transform == "jvp" and options["has_aux"] else 2
    if transform == "vmap":
        return len(result) if isinstance(result, tuple) else None
    return 2 if options["has_aux"] else None


def _values(tracer: fx.Tracer) -> Values | None:
    return tracer.__dict__.get("_values")


def _is_value(leaf: Any) -> bool:
    return issubclass(type(leaf), (fx.Proxy, torch.Tensor))


def _is_described(leaf: Any) -> bool:
    return isinstance(leaf, tuple)  # no leaf of a tree is one


def _is_no_leaf(module: Any, path: str) -> bool:
    return isinstance(module, torch.jit.ScriptModule)
