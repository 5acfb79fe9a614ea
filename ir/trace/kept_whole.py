"""A part of the model that cannot be traced is kept whole: the graph calls the module, as it calls one of torch.nn.

    while forward of `experts` was traced          in the graph
    ─────────────────────────────────────────────────────────────────────
    gate = self.gate(x)                            erased again
    for hit in gate.nonzero(): ...                 experts = self.experts(x)
        ^^^ refused

The innermost module around the failure is kept, and the next one around it if that one cannot be: one with a mark inside, or
whose call has changed a list or a dict that it was given. The last one is the model itself, whose path is empty: it is traced
again as one call.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import getitem
from typing import Any

from torch import fx, nn

from pippy.ir.base import source
from pippy.ir.base.brief import some
from pippy.ir.base.errors import InputError, MarkError, TracingError
from pippy.ir.base.marks import has_marks_inside, marks_inside, pipe_split
from pippy.ir.base.trees import children, item_names, with_children
from pippy.ir.batch_norm.deferred_batch_norm import DeferredBatchNorm
from pippy.ir.trace.assigned_buffers import assigned_in, check_fitting
from pippy.ir.trace.left_as_it_was import torch_as_it_is
from pippy.ir.trace.refusals import forgiving
from pippy.ir.trace.restore_attributes import Attributes
from pippy.ir.trace.tracing_thread import replaced
from pippy.ir.trace.trials import trials_of
from pippy.ir.trace.values import value_of


class KeptWhole:
    """The parts that ``tracer`` could not follow: the reason of each, by its path."""

    def __init__(self, tracer: fx.Tracer, attributes: Attributes, known: Mapping[str, str]) -> None:
        self.tracer, self.attributes = tracer, attributes
        self.reasons = dict(known)
        self._nodes: list[fx.Node] = []
        self._abandoned: list[fx.Node] = []
        self._in_the_way = ""  # the marks in the innermost part that would have been kept whole

    @property
    def records_model(self) -> Callable[[Any, Any], Any] | None:
        """What records the call of the model itself, if that is kept whole."""
        return (lambda *given: taken_apart(self._record("", *given))) if "" in self.reasons else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which `call` can take back what was traced."""
        create_node = self.tracer.create_node

        def create(*args: Any, **kwargs: Any) -> fx.Node:
            node = create_node(*args, **kwargs)
            self._nodes.append(node)
            return node

        with replaced(self.tracer, "create_node", create):
            yield

    def call(self, module: nn.Module, follow: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Trace the call of a module by ``follow``; if that fails, record a call of the module."""
        path = self.tracer.path_of_module(module)
        if path == "" or self.tracer.is_leaf_module(module, path):
            return follow()
        if path in self.reasons or isinstance(module, DeferredBatchNorm):
            return self._record(path, args, kwargs)
        before, contents, depth = len(self._nodes), _contents(args, kwargs), len(self.tracer.module_stack)
        has_assigned = self._has_assigned(module, path)  # in an earlier call, which is recorded
        restore_torch = torch_as_it_is()
        with forgiving() as refusals:
            try:
                result = follow()
                refusals.raise_caught()
                if not self._is_cut(module, before):
                    check_fitting(module, path, self.attributes)
                return result
            except (MarkError, InputError):  # an example for which the model fails
                raise
            except Exception as error:
                cannot = has_assigned or self._is_cut(module, before) or _contents(args, kwargs) != contents
                if cannot or trials_of(self.tracer).is_trying:
                    self._note_marks(f"{path!r} ({type(module).__name__})", module, before)
                    raise
                refusals.forgive()
                self._take_back(before)
                self.attributes.restore(path)
                restore_torch()
                while len(self.tracer.module_stack) > depth:  # torch.fx does not, after an error
                    self.tracer.module_stack.popitem()
                self.reasons[path] = reason_of(error)
        try:
            return self._record(path, args, kwargs)
        except MarkError as error:
            raise MarkError(f"{error}. {path!r} cannot be traced: {self.reasons[path]}") from None

    def _has_assigned(self, module: nn.Module, path: str) -> bool:
        inside = ((f"{path}.{name}".rstrip("."), each) for name, each in module.named_modules())
        return any(True for name, each in inside for _ in assigned_in(each, name, self.attributes))

    def _is_cut(self, module: nn.Module, before: int) -> bool:
        return has_marks_inside(module) or any(node.target is pipe_split for node in self._nodes[before:])

    def with_marks(self, error: Exception, model: nn.Module) -> Exception:
        """The error that ended the trace, with the marks that keep the part around it from being called as a whole."""
        if type(error) is TracingError:
            self._note_marks(type(model).__name__, model, 0)
            error.marks = self._in_the_way
            error.args = (f"{error}{error.marks}",)
        return error

    def _note_marks(self, part: str, module: nn.Module, before: int) -> None:
        recorded = (source.excerpt_of(node) for node in self._nodes[before:] if node.target is pipe_split)
        marks = [*dict.fromkeys(marks_inside(module))] or [*dict.fromkeys(recorded)]
        if marks and not self._in_the_way:
            are = "this mark is" if len(marks) == 1 else "these marks are"
            why = f"{part} is not called as a whole, because {are} inside; without a mark it stays in one stage:"
            self._in_the_way = "\n".join(["", why, *some(marks)])

    def _record(self, path: str, args: Any, kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_module", path, tuple(args), kwargs, name=None if path else "model")

    def _take_back(self, before: int) -> None:
        nodes, self._nodes[before:] = self._nodes[before:], []
        for node in reversed(nodes):
            if node.op == "get_attr":  # the tracer may use it again
                self._abandoned.append(node)
            else:
                node.graph.erase_node(node)

    def drop_unused(self) -> None:
        """After tracing: drop what was read of the model for parts that were taken back."""
        for node in self._abandoned:
            if not node.users:
                node.graph.erase_node(node)


def taken_apart(value: Any) -> Any:
    """A known container as one of the same kind, so that the loss is found in what a model returns."""
    known = value_of(value) if issubclass(type(value), fx.Proxy) else None
    if not children(known):
        return value
    take: Any = getattr if dataclasses.is_dataclass(known) else getitem
    names = range(len(known)) if isinstance(known, (tuple, list)) else item_names(known)
    return with_children(known, [taken_apart(take(value, name)) for name in names or ()])


def reason_of(error: BaseException, below: str = "call") -> str:
    """Why a part could not be traced: the first line of the error, and the user's line that the function ``below`` called."""
    where = getattr(error, "source", None) or source.of_traceback(error.__traceback__, below)
    text = str(error).partition("\n")[0]
    return f"{text} ({where})" if where else text


def _contents(*values: Any) -> list[Any]:
    """What lists and dicts among arguments hold, as they are now."""
    contents: list[Any] = []
    for value in values:
        if isinstance(value, dict) and not isinstance(value, fx.Proxy):
            contents.append([(key, id(item)) for key, item in value.items()])
            contents += _contents(*value.values())
        elif type(value) in (list, tuple):
            contents.append([id(item) for item in value])
            contents += _contents(*value)
    return contents
