"""Tracing: from an `nn.Module` to a marked graph, which has the model's operations and a `pipe_split` node for each cut."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base import source
from pippy.ir.base.errors import MarkError, PippyError, TracingError
from pippy.ir.base.marks import (
    SplitPoint,
    annotated_modules,
    has_marks_inside,
    pipe_split,
    recording_splits,
    split_points,
)
from pippy.ir.base.names import named_state
from pippy.ir.call.guards import Guards
from pippy.ir.call.kinds import kind_of
from pippy.ir.record.compiled import Traced
from pippy.ir.run.in_place import Snapshot
from pippy.ir.trace.arguments import (
    Call,
    Example,
    call_of,
    calling_forward,
    drop_concrete_inputs,
    nullable_inputs,
    optional_inputs,
    without_inputs,
)
from pippy.ir.trace.changed_memory import (
    connect_views,
    finish_assigned,
    record_assigned,
    varying_with_rows,
    write_early,
)
from pippy.ir.trace.checkpointing import finish_parts
from pippy.ir.trace.exported import ExportedModel, check_example, exported_modes, guards_of
from pippy.ir.trace.identities import Identities
from pippy.ir.trace.left_as_it_was import (
    Attributes,
    forgetting_one_trace,
    lookup_attribute,
    restoring_attributes,
    tracing,
)
from pippy.ir.trace.modes import (
    Recorded,
    Setting,
    first_difference,
    flags_after_train,
    follow_training,
    paths_that_differ,
    recording_training_reads,
)
from pippy.ir.trace.questions import asked_of
from pippy.ir.trace.recording import recording, watching_calls
from pippy.ir.trace.suppositions import Asked as AskedByIs
from pippy.ir.trace.suppositions import supposing
from pippy.ir.trace.tracer import FROM_OUTSIDE, PipeTracer
from pippy.ir.trace.tracing_thread import raising_refusals, refused, replaced
from pippy.ir.trace.untraceable import (
    CacheReturnedError,
    KeptWhole,
    calls_without_cache,
    check_model,
    explained,
    reason_of,
)
from pippy.ir.trace.values import (
    Values,
    find_row_sizes,
    knowing_values,
    none_if_known,
    note_bytes,
    note_missing_gradients,
)

TracerLike = fx.Tracer | Callable[[], fx.Tracer]


def trace(
    model: nn.Module,
    tracer: TracerLike | None = None,
    concrete_args: Mapping[str, Any] | None = None,
    example: Example | None = None,
) -> Traced:
    """Trace ``model`` into a marked graph. The model keeps its attributes and its training flags.

    With an example, Python may ask for sizes (`values.py`).
    """
    check_model(model)
    if not isinstance(model, ExportedModel):
        return _trace_without_cache(model, tracer, concrete_args, example)
    guards = guards_of(model)
    check_example(model, guards, example)
    traced = _trace_without_cache(model, tracer, concrete_args, example)
    traced.guards, traced.modes = guards, exported_modes(model)
    return traced


def _trace_without_cache(
    model: nn.Module, tracer: TracerLike | None, concrete_args: Mapping[str, Any] | None, example: Example | None
) -> Traced:
    first, *others = calls_without_cache(model, example, concrete_args)
    try:
        return _trace_example(model, tracer, concrete_args, first)
    except CacheReturnedError:
        for other in others:
            with suppress(PippyError):  # a forward that takes no such argument after all
                return _trace_example(model, tracer, concrete_args, other)
        raise


def _trace_example(
    model: nn.Module, tracer: TracerLike | None, concrete_args: Mapping[str, Any] | None, example: Example | None
) -> Traced:
    call = call_of(model, concrete_args, example)
    try:
        return _trace_call(model, tracer, call)
    except TracingError as error:
        is_starred = any(each.kind is each.VAR_POSITIONAL for each in call.signature.parameters.values())
        if type(error) is not TracingError or is_starred or has_marks_inside(model) or error.marks:
            raise
        untraced, reason = str(error), reason_of(error.__cause__ or error, below="trace")
    try:
        traced = _trace_call(model, tracer, without_inputs(call, {}), {"": reason})
    except MarkError as error:
        raise MarkError(f"{error}. {type(model).__name__} cannot be traced: {reason}") from None
    traced.untraced = untraced
    return traced


def _trace_call(
    model: nn.Module, tracer: TracerLike | None, call: Call, kept_whole: Mapping[str, str] | None = None
) -> Traced:
    with tracing(model) as reads:
        return _with_shared_memory(_trace(model, tracer, call, kept_whole), reads)


def _with_shared_memory(traced: Traced, reads: dict[tuple[type, str], bool]) -> Traced:
    """The traced graph with changes of memory where forward makes them, and with views for tensors that share memory."""
    traced.reads = reads
    write_early(traced)
    connect_views(traced)
    return traced


def trace_call(model: nn.Module, call: Call) -> Traced:
    """Trace one call, with the training flags that the model has now; the graph follows no others."""
    check_model(model)
    with tracing(model) as reads, recording_training_reads(), restoring_attributes(model, silent=True) as before:
        recorded = _record(model, tracer_of(None), call, before)
        finish_assigned(recorded.graph)
        attributes, signature = recorded.attributes, call.signature
        return _with_shared_memory(
            Traced(model, recorded.graph, attributes, concrete_args=call.concrete, signature=signature), reads
        )


def trace_in_both_modes(model: nn.Module, call: Call) -> Traced:
    """Trace one call; the graph follows the training flags of the model."""
    check_model(model)
    return _trace_call(model, None, call)


def _trace(
    model: nn.Module, tracer: TracerLike | None, call: Call, kept_whole: Mapping[str, str] | None = None
) -> Traced:
    with recording_training_reads() as reads, restoring_attributes(model) as before:
        recorded = _record(model, tracer_of(tracer), call, before, kept_whole)
        recorded, call, identities = _answer_identities(model, tracer, call, before, recorded)
        finish_assigned(recorded.graph)
        attributes = recorded.attributes
    of_rows: dict[fx.Node, int] = {}
    if call.is_example:
        of_rows = find_row_sizes(recorded.values, recorded.graph, attributes)
        if varying := _kept_for_their_buffers(model, recorded.graph):
            return _trace(model, tracer, call, {**recorded.kept_whole.reasons, **varying})
        note_bytes(recorded.values, recorded.graph)
        note_missing_gradients(recorded.values, recorded.graph)
    traced = Traced(model, recorded.graph, attributes, concrete_args=call.concrete, signature=call.signature)
    traced.kept_whole = recorded.kept_whole.reasons
    kinds = {name: kind_of(value) for name, value in call.known_inputs.items()} if call.is_example else {}
    flags = {} if call.is_example else {name: value for name, value in call.known_inputs.items() if type(value) is bool}
    traced.guards = Guards(
        kinds,
        asked_of(recorded.graph, recorded.values.is_tensor, of_rows),
        one=tuple(identities.one),
        different=tuple(identities.different),
        flags=flags,
        other_than=identities.other_than,
    )
    traced.required_inputs = tuple(call.known_inputs) if call.is_example else _find_required_inputs(traced, tracer)
    traced.modes.after = flags_after_train(model)
    if reads:
        _follow_modes(traced, tracer, call, reads)
    for node, rows in of_rows.items():  # now: graphs of two modes are compared without
        node.args = (*node.args, rows)
    if call.is_example and kept_whole is None and _are_small(model, traced.differing):
        reason = "it does something else in training than in evaluation"
        return _trace(model, tracer, call, {**traced.kept_whole, **dict.fromkeys(sorted(traced.differing), reason)})
    return traced


def _kept_for_their_buffers(model: nn.Module, graph: fx.Graph) -> dict[str, str]:
    """The modules to keep whole because they assign buffers whose size depends on the rows. Raises where one cannot be."""
    reasons: dict[str, str] = {}
    for name, error in varying_with_rows(graph):
        path = name.rpartition(".")[0]
        if path == "" or has_marks_inside(model.get_submodule(path)):
            raise error
        reasons[path] = str(error).partition("\n")[0]
    return reasons


def _are_small(model: nn.Module, paths: Collection[str]) -> bool:
    """Whether nobody would cut inside of modules: none is the model, and what they hold has no parameters."""
    parts = [model.get_submodule(path) for path in paths if path]
    held = [child for part in parts for child in part.children()]
    return (
        0 < len(parts) == len(paths)
        and not any(map(has_marks_inside, parts))
        and not any(True for child in held for _ in child.parameters())
    )


def tracer_of(given: TracerLike | None) -> fx.Tracer:
    """The tracer that the user has given, as an object of its class."""
    tracer: object = PipeTracer() if given is None else given
    if not isinstance(tracer, fx.Tracer) and callable(tracer):
        tracer = tracer()
    if not isinstance(tracer, fx.Tracer):
        raise TracingError(f"tracer gives a {type(tracer).__name__}; it must be a torch.fx.Tracer, or a class of one")
    return tracer


@dataclass
class _Recorded:
    """What a tracer made of a model."""

    graph: fx.Graph
    kept_whole: KeptWhole
    values: Values
    asked_by_name: AskedByIs
    attributes: dict[str, Any] = field(default_factory=dict)


def _answer_identities(
    model: nn.Module, tracer: TracerLike | None, call: Call, before: Attributes, recorded: _Recorded
) -> tuple[_Recorded, Call, Identities]:
    """What was recorded, with right answers to `x is y`, and the call for further traces."""

    def again(other: Call) -> _Recorded:
        before.restore()
        return _record(model, tracer_of(tracer), other, before, recorded.kept_whole.reasons)

    identities = Identities(recorded, call, again, model)
    identities.find()
    if not recorded.kept_whole.records_model:  # which takes flags and defaults as they come
        identities.fix_flags()
        identities.find_defaults()
    return identities.recorded, identities.call, identities


def _record(
    model: nn.Module, tracer: fx.Tracer, call: Call, before: Attributes, kept_whole: Mapping[str, str] | None = None
) -> _Recorded:
    """The graph of ``model``. Those parts are kept whole that are so in ``kept_whole``, and those that must be."""

    def record() -> _Recorded:
        parts = KeptWhole(tracer, before, kept_whole or {})
        with _following_hooks(tracer) if call.trials.follows_hooks else nullcontext():
            recorded = _record_calls(model, tracer, call, _Calls(model, tracer, parts))
        call.trials.check_stale(sum(name.startswith(FROM_OUTSIDE) for name in recorded.attributes))
        return recorded

    def again() -> None:
        before.restore()
        tracer.module_stack.clear()  # torch.fx does not, after an error

    call.trials.has_hooks = any(
        (each._forward_hooks or each._forward_pre_hooks) and tracer.is_leaf_module(each, path)
        for path, each in model.named_modules()
        if path
    )
    return call.trials.until_known(record, again)


@contextmanager
def _following_hooks(tracer: fx.Tracer) -> Iterator[None]:
    """A context in which modules with hooks are traced through."""
    is_leaf = tracer.is_leaf_module

    def has_no_hooks(module: nn.Module, path: str) -> bool:
        return is_leaf(module, path) and not (module._forward_hooks or module._forward_pre_hooks)

    with replaced(tracer, "is_leaf_module", has_no_hooks):
        yield


def _record_calls(model: nn.Module, tracer: fx.Tracer, call: Call, calls: "_Calls") -> _Recorded:
    buffers, state = dict(model.named_buffers()), dict(named_state(model))  # forward may assign buffers
    buffers_before = Snapshot(buffers)
    tracer.__dict__["_trials"] = call.trials
    try:
        with (
            forgetting_one_trace(),
            raising_refusals(),
            knowing_values(tracer, model, call.known_inputs, call.is_example, call.results) as values,
            recording(tracer, model),
            call.trials.ending_at_operations(tracer),
            calls.kept_whole.recording(),
            calls.recording(),
            calling_forward(tracer, call, calls.kept_whole.records_model) as concrete,
            supposing(tracer, call.supposition, values) as asked,
            watching_calls(tracer),
        ):
            graph = tracer.trace(model, concrete and dict(concrete))
    except PippyError as error:
        raise calls.kept_whole.with_marks(error, model) from error.__cause__
    except Exception as error:
        raise calls.kept_whole.with_marks(explained(error, model, call.is_example), model) from error
    for node in asked.inputs:
        values.fix(node, values.of(node))
    calls.check_all_met()
    calls.kept_whole.drop_unused()
    finish_parts(graph)
    changed = buffers_before.changed()
    if changed:
        raise TracingError(
            f"forward changes the buffers {changed} by means that cannot be recorded; use the in-place methods of tensors "
            "(self.count.add_(1))"
        )
    record_assigned(model, graph, calls.kept_whole.attributes, state, values)
    if concrete:
        drop_concrete_inputs(model, graph, concrete)
    attributes = _target_values(model, graph, state, calls.kept_whole.attributes)
    return _Recorded(graph, calls.kept_whole, values, asked, attributes)


def _refuse_backward_hooks(path: str, follow: Callable[[], Any]) -> Any:
    """Have a module kept whole that has backward hooks. With a mark inside, which is seen when it is traced, it is refused."""
    follow()
    raise TracingError(
        f"{path!r} has backward hooks, so one stage must call all of it, but there is a mark inside; move the mark out of it, "
        "or take the hooks off"
    )


class _Calls:
    """While a tracer runs, makes a node of each `pipe_split()` and of each mark on a module, and keeps modules whole."""

    def __init__(self, model: nn.Module, tracer: fx.Tracer, kept_whole: KeptWhole) -> None:
        self.tracer, self.unmet, self.kept_whole = tracer, dict(annotated_modules(model)), kept_whole

    @contextmanager
    def recording(self) -> Iterator[None]:
        call_module = self.tracer.call_module

        def call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if module not in (self.tracer.submodule_paths or {}):
                return _call_module_from_outside(module, forward, args, kwargs)
            points = split_points(module)
            if points:
                self.unmet.pop(self.tracer.path_of_module(module), None)
            if SplitPoint.BEGINNING in points:
                self._mark()
            follow = partial(call_module, module, forward, args, kwargs)
            path = self.tracer.path_of_module(module)
            if (module._backward_hooks or module._backward_pre_hooks) and not self.tracer.is_leaf_module(module, path):
                follow = partial(_refuse_backward_hooks, path, follow)
            if not self.kept_whole.attributes.has_other_tensors(module):
                result = self.kept_whole.call(module, follow, args, kwargs)
            elif self.tracer.is_leaf_module(module, path):
                result = forward(*args, **kwargs)
            else:
                result = follow()
            if SplitPoint.END in points:
                self._mark()
            return none_if_known(result) if issubclass(type(result), fx.Proxy) else result

        with replaced(self.tracer, "call_module", call), recording_splits(self._mark):
            yield

    def _mark(self) -> None:
        self.tracer.create_node("call_function", pipe_split, (), {})

    def check_all_met(self) -> None:
        if self.unmet:
            raise MarkError(
                f"split points on modules that tracing never called: {', '.join(map(repr, self.unmet))}. Either forward "
                "does not call them, or they lie inside a module that is not traced through (a module of torch.nn, or a "
                "leaf of your tracer); mark that module, or pass a tracer whose is_leaf_module says False for it"
            )


def _call_module_from_outside(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Trace through a module that forward has made, a loss for example; it is no part of the model, so no node can call it."""
    tensors = [name for name, _ in named_state(module)]
    if tensors:
        raise refused(
            TracingError(
                f"forward calls a {type(module).__name__} that is not a part of the model, and it has parameters or buffers "
                f"({', '.join(tensors)}); make it in __init__, and keep it as an attribute (or in an nn.ModuleList)"
            )
        )
    return forward(*args, **kwargs)


def _target_values(
    model: nn.Module, graph: fx.Graph, state: Mapping[str, torch.Tensor], before: Attributes
) -> dict[str, Any]:
    """The value of each target of the graph. Found now, because the constants that tracing sets on the model are removed."""
    targets = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    modules = dict(model.named_modules(remove_duplicate=False))
    known = {target: state.get(target, before.get(target, None)) for target in targets}
    return {
        target: value if value is not None else lookup_attribute(modules, target) for target, value in known.items()
    }


def _find_required_inputs(traced: Traced, tracer: TracerLike | None) -> tuple[str, ...]:
    """The inputs that must not be None: without them, forward does something else, in its operations or its constants.

    While forward was traced, each of its inputs was a proxy, so none was None.
    """
    if "" in traced.kept_whole:  # forward itself asks, in each call
        return ()
    required = [
        name for name in nullable_inputs(traced.model, traced.graph) if _differs_without(traced, tracer, [name])
    ]
    optional = optional_inputs(traced.model, traced.graph)
    if not optional or not _differs_without(traced, tracer, optional):
        return tuple(required)
    if len(optional) == 1:
        return (*required, *optional)
    alone = [name for name in optional if _differs_without(traced, tracer, [name])]
    others = [name for name in optional if name not in alone]
    together = others if others and _differs_without(traced, tracer, others) else []
    return (*required, *alone, *together)


def _differs_without(traced: Traced, tracer: TracerLike | None, names: list[str]) -> bool:
    concrete = {**traced.concrete_args, **dict.fromkeys(names)}
    try:
        without = _retrace(traced, tracer, call_of(traced.model, concrete))
    except PippyError:
        return True
    return first_difference(traced, without, frozenset(names), constants=True) is not None


def _retrace(traced: Traced, tracer: TracerLike | None, call: Call) -> Recorded:
    """Trace the model once more, under other conditions."""
    with restoring_attributes(traced.model, silent=True) as before:
        recorded = _record(traced.model, tracer_of(tracer), call, before, traced.kept_whole)
        finish_assigned(recorded.graph)
        return recorded


def _follow_modes(traced: Traced, tracer: TracerLike | None, call: Call, read: list[nn.Module]) -> None:
    """Trace again with the flags of each mode, and do what the table in `modes.py` says."""
    modules = dict(traced.model.named_modules())
    before = {path: module.training for path, module in modules.items()}
    reads = _paths_of(modules, read)
    graphs: list[tuple[Mapping[str, bool], fx.Graph]] = [(before, traced.graph)]
    for mode in (True, False):
        flags = {path: traced.modes.flag(path, mode) for path in modules}
        if all(flags[path] == before[path] for path in reads):
            graphs.append((flags, traced.graph))
            continue
        try:
            with recording_training_reads({modules[path]: flag for path, flag in flags.items()}) as also_read:
                other = _retrace(traced, tracer, call)
        except PippyError as error:  # this mode cannot be traced, or not cut as it is marked
            traced.modes.refused[mode] = f"  {error}"
            continue
        difference = first_difference(traced, other)
        if difference is not None:  # in more than constants
            traced.modes.refused[mode] = source.excerpt_of(difference)
            traced.differing |= paths_that_differ(traced.graph, other.graph)
            continue
        graphs.append((flags, other.graph))
        reads |= _paths_of(modules, also_read)
    paths = [path for path in modules if path in reads]
    follow_training([Setting({path: flags[path] for path in paths}, graph) for flags, graph in graphs])
    traced.attributes.update({f"{path}.training".lstrip("."): before[path] for path in paths})
    traced.modes.traced = {path: before[path] for path in paths}


def _paths_of(modules: Mapping[str, nn.Module], read: Sequence[nn.Module]) -> set[str]:
    ids = set(map(id, read))
    return {path for path, module in modules.items() if id(module) in ids}
