"""From any `nn.Module` to a marked graph: one `pipe_split` node for each cut, and everything else as in the model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from pippy.ir import source
from pippy.ir.errors import MarkError, PippyError, TracingError
from pippy.ir.marks import SplitPoint, annotated_modules, pipe_split, recording_splits, split_points
from pippy.ir.modes import first_difference, follow_training, watched_training
from pippy.ir.preserve import unaltered
from pippy.ir.recording import RecordingProxy, recording


class PipeTracer(fx.Tracer):
    """The default tracer: modules of `torch.nn` are leaves, everything else is traced through.

    Derive from it to choose other leaves:

    >>> class MyTracer(PipeTracer):
    ...     def is_leaf_module(self, m, module_qualified_name):
    ...         return module_qualified_name == "encoder" or super().is_leaf_module(m, module_qualified_name)
    """

    # A buffer that is changed in place must be changed when the graph runs, not when it is traced.
    proxy_buffer_attributes = True

    def trace(self, root: nn.Module, concrete_args: dict[str, Any] | None = None) -> fx.Graph:  # type: ignore[override]
        self._state_names = {id(tensor): name for name, tensor in _state(root)}
        return super().trace(root, concrete_args)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        # As in fx.Tracer, without its search through all parameters at each access.
        if not isinstance(attr_val, torch.Tensor):
            return attr_val
        name = self._state_names.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return RecordingProxy(node, self)


def _state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@dataclass
class Traced:
    """A marked graph, and what its names mean.

    ``attributes`` resolves every `get_attr` and `call_module` target. ``fixed_mode`` is the mode that the graph is
    bound to, where the model's structure depends on it, and ``fixed_at`` the line where the modes part.
    """

    model: nn.Module
    graph: fx.Graph
    attributes: dict[str, Any] = field(default_factory=dict)
    concrete_args: dict[str, Any] = field(default_factory=dict)
    fixed_mode: bool | None = None
    fixed_at: str = ""


TracerLike = fx.Tracer | Callable[[], fx.Tracer]


def trace(model: nn.Module, tracer: TracerLike | None = None, concrete_args: Mapping[str, Any] | None = None) -> Traced:
    """Trace ``model`` into a marked graph. The model is left as it was."""
    _check_model(model)
    concrete = _check_concrete_args(concrete_args)
    with watched_training() as reads, unaltered(model):
        graph = _record(model, _tracer(tracer), concrete)
        attributes = _attributes(model, graph)
    traced = Traced(model, graph, attributes, concrete)
    if reads.modules:
        _follow_modes(traced, tracer, {id(module) for module in reads.modules})
    _drop_concrete_inputs(graph, concrete)
    return traced


def _check_model(model: object) -> None:
    if isinstance(model, type):
        raise TracingError(f"{model.__name__} is a class; give an instance of it: pipeline({model.__name__}(...))")
    if not isinstance(model, nn.Module):
        raise TracingError(
            f"this is a {type(model).__name__}, not an nn.Module; put the function in a module's forward"
        )
    if "forward" in model.__dict__:
        raise TracingError(
            f"this {type(model).__name__} has a forward set on the instance, which tracing would pass by; "
            "define forward in the class"
        )


def _check_concrete_args(concrete_args: Mapping[str, Any] | None) -> dict[str, Any]:
    concrete = dict(concrete_args or {})
    for name, value in concrete.items():
        if not (value is None or isinstance(value, (bool, int, float, str))):
            raise TracingError(
                f"concrete_args[{name!r}] is a {type(value).__name__}; a value that the graph is specialized to must be "
                "None, a bool, an int, a float or a str"
            )
    return concrete


def _tracer(given: TracerLike | None) -> fx.Tracer:
    tracer = PipeTracer() if given is None else given if isinstance(given, fx.Tracer) else given()
    if not isinstance(tracer, fx.Tracer):
        raise TracingError(f"tracer gives a {type(tracer).__name__}; it must be a torch.fx.Tracer, or a class of one")
    return tracer


def _record(model: nn.Module, tracer: fx.Tracer, concrete_args: dict[str, Any]) -> fx.Graph:
    versions = {name: buffer._version for name, buffer in model.named_buffers()}
    marks = _Marks(model, tracer)
    try:
        with recording(tracer), marks.recording():
            graph = tracer.trace(model, dict(concrete_args) or None)
    except PippyError:
        raise
    except Exception as error:
        raise _explained(error, model) from error
    marks.check_all_met()
    changed = [name for name, buffer in model.named_buffers() if buffer._version != versions[name]]
    if changed:
        raise TracingError(
            f"tracing changed the buffers {changed} themselves; set proxy_buffer_attributes = True on your tracer, so "
            "that the change is recorded"
        )
    return graph


class _Marks:
    """Turns `pipe_split()` and annotated modules into nodes while a tracer runs."""

    def __init__(self, model: nn.Module, tracer: fx.Tracer) -> None:
        self.tracer, self.unmet = tracer, dict(annotated_modules(model))

    @contextmanager
    def recording(self) -> Iterator[None]:
        call_module = self.tracer.call_module

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            points = split_points(module)
            if points:
                self.unmet.pop(self.tracer.path_of_module(module), None)
            if SplitPoint.BEGINNING in points:
                self._mark()
            result = call_module(module, *args, **kwargs)
            if SplitPoint.END in points:
                self._mark()
            return result

        self.tracer.call_module = call  # type: ignore[method-assign,assignment]
        try:
            with recording_splits(self._mark):
                yield
        finally:
            del self.tracer.call_module

    def _mark(self) -> None:
        self.tracer.create_node("call_function", pipe_split, (), {})

    def check_all_met(self) -> None:
        if self.unmet:
            raise MarkError(
                f"split points on modules that tracing never called: {', '.join(map(repr, self.unmet))}. Either forward "
                "does not call them, or they lie inside a module that is not traced through (a module of torch.nn, or a "
                "leaf of your tracer); mark that module, or pass a tracer whose is_leaf_module says False for it"
            )


def _attributes(model: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    """What every target of the graph names; resolved now, since tracing's own constants are about to be removed."""
    targets = {node.target for node in graph.nodes if node.op in ("get_attr", "call_module")}
    modules = dict(model.named_modules(remove_duplicate=False))
    return {str(target): _lookup(modules, str(target)) for target in targets}


def _lookup(modules: dict[str, nn.Module], target: str) -> Any:
    if target in modules:
        return modules[target]
    path, _, name = target.rpartition(".")
    found = modules[path] if path in modules else _walk(modules[""], path)
    return getattr(found, name)


def _walk(value: Any, path: str) -> Any:
    for atom in path.split("."):
        value = getattr(value, atom)
    return value


def _follow_modes(traced: Traced, tracer: TracerLike | None, read: set[int]) -> None:
    training = traced.model.training
    try:
        with watched_training(turned_over=True), unaltered(traced.model, silent=True):
            turned = _record(traced.model, _tracer(tracer), traced.concrete_args)
    except PippyError as error:  # the other mode cannot be traced, or not cut as it is marked
        traced.fixed_mode, traced.fixed_at = training, f"  {error}"
        return
    difference = first_difference(traced.graph, turned)
    if difference is not None:
        traced.fixed_mode, traced.fixed_at = training, source.excerpt_of(difference)
        return
    paths = [path for path, module in traced.model.named_modules() if id(module) in read]
    follow_training(traced.graph, turned, training, paths)
    modules = dict(traced.model.named_modules())
    traced.attributes.update({f"{path}.training".lstrip("."): modules[path].training for path in paths})


def _drop_concrete_inputs(graph: fx.Graph, concrete_args: dict[str, Any]) -> None:
    """fx leaves a placeholder and an assertion for every argument that it specialized; calls are checked elsewhere."""
    for node in graph.find_nodes(op="placeholder"):
        name, _, number = str(node.target).rpartition("_")
        if name not in concrete_args or not number.isdigit():
            continue
        for checked in [user for first in node.users for user in (*first.users, first)]:
            graph.erase_node(checked)
        graph.erase_node(node)


_REMEDIES = (
    (
        "control flow",
        "tracing sees no values, so an `if`, `while`, `assert` or `bool()` on a tensor cannot be followed",
    ),
    ("cannot be iterated", "tracing sees no values, so a loop over a tensor or an input cannot be followed"),
    ("'len' is not supported", "tracing sees no values, so len() of one is unknown; use x.size(0)"),
    ("interpreted as an integer", "tracing sees no values, so range() or an index needs a number known beforehand"),
    ("__int__ returned non-int", "tracing sees no values, so int() of one is unknown"),
    ("__index__ returned non-int", "tracing sees no values, so range() or an index needs a number known beforehand"),
    ("must be real number", "tracing sees no values, so float() of one is unknown"),
    ("as buffer", "assigning to a buffer cannot be recorded; change it in place: self.buffer.copy_(...), .add_(...)"),
    ("as parameter", "assigning to a parameter cannot be recorded; change it in place under torch.no_grad()"),
    ("unexpected keyword argument", "see the message above"),
)

_ADVICE = (
    "What to do: pass the value as a constant with concrete_args={{...}} if it is an argument; or move this code into a "
    "module of its own and keep it whole with a tracer whose is_leaf_module says True for it; or mark the function with "
    "torch.fx.wrap."
)


def _explained(error: Exception, model: nn.Module) -> TracingError:
    text = str(error)
    reasons = [reason for clue, reason in _REMEDIES if clue in text]
    where = source.of_traceback(error.__traceback__, below="trace")
    lines = [f"cannot trace {type(model).__name__}: {type(error).__name__}: {text}"]
    lines += [where.excerpt()] if where else []
    lines += [f"Why: {reason}." for reason in reasons[:1]]
    return TracingError("\n".join([*lines, _ADVICE.format()]))
