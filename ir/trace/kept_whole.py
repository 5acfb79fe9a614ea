"""A part of the model that cannot be traced is kept whole: the graph calls the module, as it calls one of torch.nn.

    while forward of `experts` was traced          in the graph
    ─────────────────────────────────────────────────────────────────────
    gate = self.gate(x)                            erased again
    for hit in gate.nonzero(): ...                 experts = self.experts(x)
        ^^^ refused

The innermost module around the failure is kept, and the next one around it if that one cannot be: the model itself is none,
and neither is a part with a mark inside, nor one whose call has changed a list or a dict that it was given.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from pippy.ir.base import source
from pippy.ir.base.errors import InputError, MarkError
from pippy.ir.base.marks import has_marks_inside, pipe_split
from pippy.ir.batch_norm.deferred_batch_norm import DeferredBatchNorm
from pippy.ir.trace.assigned_buffers import assigned_in, check_fitting
from pippy.ir.trace.refusals import forgiving
from pippy.ir.trace.restore_attributes import Attributes
from pippy.ir.trace.tracing_thread import replaced
from pippy.ir.trace.trials import trials_of


class KeptWhole:
    """The parts that ``tracer`` could not follow: the reason of each, by its path."""

    def __init__(self, tracer: fx.Tracer, attributes: Attributes, known: Mapping[str, str]) -> None:
        self.tracer, self.attributes = tracer, attributes
        self.reasons = dict(known)
        self._nodes: list[fx.Node] = []
        self._abandoned: list[fx.Node] = []

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
                    raise
                refusals.forgive()
                self._take_back(before)
                self.attributes.restore(path)
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

    def _record(self, path: str, args: Any, kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_module", path, args, kwargs)

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


def reason_of(error: Exception) -> str:
    """Why a part could not be traced: the line, and the first line of the error."""
    where = getattr(error, "source", None) or source.of_traceback(error.__traceback__, below="call")
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
