"""From a model and an example to a marked graph, by `torch.export`. What follows does not ask which front end made it."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from pippy.ir.base.errors import TracingError
from pippy.ir.export.guards import guards_of
from pippy.ir.export.program import Exporter
from pippy.ir.export.rebuild import marked_graph, with_defaults
from pippy.ir.trace.arguments import Example, check_concrete_args, signature_of
from pippy.ir.trace.left_as_it_was import tracing
from pippy.ir.trace.restore_attributes import restoring_attributes
from pippy.ir.trace.trace import Retraced, Traced, TracerLike, follow_modes, paths_of, tracer_of
from pippy.ir.trace.tracer import PipeTracer
from pippy.ir.trace.training_flag import flags_after_train, recording_training_reads
from pippy.ir.trace.transformers import TRACED_THROUGH
from pippy.ir.trace.untraceable import check_model
from pippy.ir.trace.values import Values, find_row_sizes


def trace_export(
    model: nn.Module,
    tracer: TracerLike | None = None,
    concrete_args: Mapping[str, Any] | None = None,
    given: Example | None = None,
) -> Traced:
    """Trace ``model`` with an example of its arguments. The model keeps its attributes and its training flags."""
    check_model(model)
    if given is None:
        raise TracingError(
            "front_end='export' runs the model on fake tensors that are like yours, and needs arguments for that: give "
            "example_args, as you will call the Pipe with them (the loss's target last), or example_kwargs"
        )
    signature = signature_of(model)
    args, kwargs = given.of_model(signature)
    concrete = check_concrete_args(model, concrete_args)
    try:
        example = signature.bind(*args, **{**kwargs, **concrete})
    except TypeError as error:
        raise given.unfit(signature, error, concrete) from None
    is_leaf = default_leaf if tracer is None else tracer_of(tracer).is_leaf_module
    with tracing(model):
        return _Export(model, example, is_leaf).trace()


def default_leaf(module: nn.Module, path: str) -> bool:
    """Modules of `torch.nn` are called whole, except those that are made of many layers."""
    return not isinstance(module, TRACED_THROUGH) and PipeTracer().is_leaf_module(module, path)


class _Export:
    """The exports of one model: as it is, and in the other mode."""

    def __init__(
        self, model: nn.Module, example: inspect.BoundArguments, is_leaf: Callable[[nn.Module, str], bool]
    ) -> None:
        self.model = model
        self.exporter = Exporter(model, example, is_leaf)
        self.modules = dict(model.named_modules())

    def trace(self) -> Traced:
        traced, reads = self._traced({path: module.training for path, module in self.modules.items()})
        traced.modes.after = flags_after_train(self.model)
        example = self.exporter.example.arguments
        values = Values(PipeTracer(), self.model, example, example=True, attributes=traced.attributes)
        find_row_sizes(values, traced.graph, traced.attributes)
        if reads:
            follow_modes(traced, reads, lambda flags: self._again(traced, flags))
        return traced

    def _traced(self, flags: Mapping[str, bool], silent: bool = False) -> tuple[Traced, set[str]]:
        """The graph with these training flags, and the modules whose flags forward has read."""
        with _with_flags(self.modules, flags), restoring_attributes(self.model, silent):
            with recording_training_reads() as reads:
                program = self.exporter.export(reads)
            signature = signature_of(self.model)
            graph, attributes = marked_graph(self.model, signature, program)
        left_out = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if name not in program.inputs and parameter.default is not parameter.empty
        }
        concrete = {**left_out, **program.constants}
        guards = guards_of(self.model, program)
        traced = Traced(self.model, graph, attributes, concrete, signature=signature, guards=guards)
        return traced, paths_of(self.model, reads)

    def _again(self, traced: Traced, flags: Mapping[str, bool]) -> Retraced:
        other, reads = self._traced(flags, silent=True)
        with_defaults(traced.graph, other.graph)

        def accept() -> None:
            traced.guards = traced.guards.joined(other.guards.conditions)

        return Retraced(other.recorded(), reads, accept)


@contextmanager
def _with_flags(modules: Mapping[str, nn.Module], flags: Mapping[str, bool]) -> Iterator[None]:
    before = {path: module.__dict__.get("training") for path, module in modules.items()}
    for path, module in modules.items():
        if before[path] is not None:
            module.__dict__["training"] = flags[path]
    try:
        yield
    finally:
        for path, module in modules.items():
            if before[path] is not None:
                module.__dict__["training"] = before[path]
