"""From any `nn.Module` to a marked graph: one `pipe_split` node for each cut, and everything else as in the model."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict

from pippy.ir import source
from pippy.ir.errors import MarkError, PippyError, TracingError
from pippy.ir.front.arguments import check_concrete_args, drop_concrete_inputs, optional_inputs, signature_of
from pippy.ir.front.proxies import RecordingProxy, StateProxy
from pippy.ir.front.recording import recording
from pippy.ir.front.restore_attributes import restoring_attributes
from pippy.ir.front.training_flag import first_difference, flags_after_train, follow_training, recording_training_reads
from pippy.ir.front.untraceable import check_assigned_buffers, check_backward_hooks, check_model, explained
from pippy.ir.marks import SplitPoint, annotated_modules, pipe_split, recording_splits, split_points
from pippy.ir.modes import Modes
from pippy.ir.names import first_names, named_state


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
        self._state_names = first_names(root)
        return super().trace(root, concrete_args)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        # As in fx.Tracer, without its search through all parameters at each access.
        if not isinstance(attr_val, torch.Tensor):
            return attr_val
        name = self._state_names.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            made = self.create_proxy(
                "get_attr", name, (), {}, proxy_factory_fn=lambda node: StateProxy(node, self, attr_val)
            )
            parameter_proxy_cache[name] = made
        return parameter_proxy_cache[name]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return RecordingProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, torch.jit.ScriptModule) or super().is_leaf_module(m, module_qualified_name)

    def create_arg(self, a: Any) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(a, numpy.generic):  # a number that generated code cannot write
            return a.item()
        if numpy is not None and isinstance(a, numpy.ndarray):
            return super().create_arg(torch.from_numpy(a.copy()))
        if isinstance(a, dict) and type(a) not in (dict, immutable_dict):
            return self._create_mapping(a)
        return super().create_arg(a)

    def _create_mapping(self, mapping: dict[str, Any]) -> fx.Node:
        """A dict of a class of its own, an OrderedDict or a model's output class, stays of that class."""
        if dataclasses.is_dataclass(mapping):
            return self.create_node("call_function", type(mapping), (), super().create_arg(dict(mapping)))
        return self.create_node("call_function", type(mapping), (super().create_arg(dict(mapping)),), {})


@dataclass
class Traced:
    """A marked graph, and what its names mean.

    ``attributes`` resolves every `get_attr` and `call_module` target. ``given`` names inputs that may not be None, since
    forward does something else then. ``balanced`` says that a pass has placed the marks, or left them out on purpose.
    """

    model: nn.Module
    graph: fx.Graph
    attributes: dict[str, Any] = field(default_factory=dict)
    concrete_args: dict[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    signature: inspect.Signature = field(default_factory=inspect.Signature)
    modes: Modes = field(default_factory=Modes)
    balanced: bool = False


TracerLike = fx.Tracer | Callable[[], fx.Tracer]


def trace(model: nn.Module, tracer: TracerLike | None = None, concrete_args: Mapping[str, Any] | None = None) -> Traced:
    """Trace ``model`` into a marked graph. The model is left as it was."""
    check_model(model)
    concrete = check_concrete_args(model, concrete_args)
    state = dict(named_state(model))  # forward may assign buffers while it is traced
    with recording_training_reads() as reads, restoring_attributes(model):
        graph = _record(model, _tracer(tracer), concrete)
        attributes = _attributes(model, graph, state)
    traced = Traced(model, graph, attributes, concrete, signature=signature_of(model))
    traced.given = _inputs_traced_as_given(traced, tracer)
    traced.modes.after = flags_after_train(model)
    if reads.modules:
        _follow_modes(traced, tracer, {id(module) for module in reads.modules})
    return traced


def _tracer(given: TracerLike | None) -> fx.Tracer:
    tracer: object = PipeTracer() if given is None else given
    if not isinstance(tracer, fx.Tracer) and callable(tracer):
        tracer = tracer()
    if not isinstance(tracer, fx.Tracer):
        raise TracingError(f"tracer gives a {type(tracer).__name__}; it must be a torch.fx.Tracer, or a class of one")
    return tracer


def _record(model: nn.Module, tracer: fx.Tracer, concrete_args: dict[str, Any]) -> fx.Graph:
    buffers = dict(model.named_buffers())
    versions = {name: buffer._version for name, buffer in buffers.items()}
    calls = _Calls(model, tracer)
    try:
        with recording(tracer), calls.recording():
            graph = tracer.trace(model, dict(concrete_args) or None)
    except PippyError:
        raise
    except Exception as error:
        raise explained(error, model) from error
    calls.check_all_met()
    changed = [name for name, buffer in buffers.items() if buffer._version != versions[name]]
    if changed:
        raise TracingError(
            f"forward changes the buffers {changed} by means that cannot be recorded; use the in-place methods of tensors "
            "(self.count.add_(1))"
        )
    check_assigned_buffers(model, buffers)
    drop_concrete_inputs(model, graph, concrete_args)
    return graph


class _Calls:
    """Turns `pipe_split()` and annotated modules into nodes while a tracer runs."""

    def __init__(self, model: nn.Module, tracer: fx.Tracer) -> None:
        self.tracer, self.unmet = tracer, dict(annotated_modules(model))

    @contextmanager
    def recording(self) -> Iterator[None]:
        call_module = self.tracer.call_module

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            points = split_points(module)
            if module._backward_hooks or module._backward_pre_hooks:
                check_backward_hooks(self.tracer, module)
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


def _attributes(model: nn.Module, graph: fx.Graph, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What every target of the graph names; resolved now, since tracing's own constants are about to be removed."""
    targets = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    modules = dict(model.named_modules(remove_duplicate=False))
    return {target: state[target] if target in state else _lookup(modules, target) for target in targets}


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


def _inputs_traced_as_given(traced: Traced, tracer: TracerLike | None) -> tuple[str, ...]:
    """Which optional inputs forward treats differently when they are None; their placeholders never were."""
    optional = optional_inputs(traced.model, traced.graph)
    if not optional or not _differs_without(traced, tracer, optional):
        return ()
    if len(optional) == 1:
        return tuple(optional)
    alone = [name for name in optional if _differs_without(traced, tracer, [name])]
    others = [name for name in optional if name not in alone]
    together = others if others and _differs_without(traced, tracer, others) else []
    return (*alone, *together)


def _differs_without(traced: Traced, tracer: TracerLike | None, names: list[str]) -> bool:
    concrete = {**traced.concrete_args, **dict.fromkeys(names)}
    try:
        with restoring_attributes(traced.model, silent=True):
            without = _record(traced.model, _tracer(tracer), concrete)
    except PippyError:
        return True
    return first_difference(traced.graph, without, frozenset(names)) is not None


def _follow_modes(traced: Traced, tracer: TracerLike | None, read: set[int]) -> None:
    modules = dict(traced.model.named_modules())
    flags = {path: module.training for path, module in modules.items() if id(module) in read}
    try:
        with recording_training_reads(inverted=True), restoring_attributes(traced.model, silent=True):
            turned = _record(traced.model, _tracer(tracer), traced.concrete_args)
    except PippyError as error:  # the other mode cannot be traced, or not cut as it is marked
        traced.modes.fixed, traced.modes.fixed_at = flags, f"  {error}"
        return
    difference = first_difference(traced.graph, turned)
    if difference is not None:
        traced.modes.fixed, traced.modes.fixed_at = flags, source.excerpt_of(difference)
        return
    follow_training(traced.graph, turned, flags)
    traced.attributes.update({f"{path}.training".lstrip("."): flag for path, flag in flags.items()})
