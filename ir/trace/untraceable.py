"""What symbolic tracing cannot follow is refused, or the part of the model that does it is kept whole.

Each error has the line and a remedy. Where a part is kept whole, the graph calls the module, as it calls one of torch.nn:

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
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base import source
from pippy.ir.base.errors import InputError, MarkError, TracingError
from pippy.ir.base.marks import has_marks_inside, marks_inside, pipe_split
from pippy.ir.base.readable import some
from pippy.ir.base.surroundings import global_hooks
from pippy.ir.base.trees import children, item_names, with_children
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.model_watch import hooks_of
from pippy.ir.run.batch_norm import DeferredBatchNorm
from pippy.ir.trace.arguments import Example, signature_of
from pippy.ir.trace.changed_memory import assigned_in, check_fitting
from pippy.ir.trace.left_as_it_was import Attributes, torch_as_it_is
from pippy.ir.trace.tracing_thread import forgiving, then
from pippy.ir.trace.trials import trials_of
from pippy.ir.trace.values import value_of

_TRANSFORM = (
    "a transform (torch.vmap, torch.func.grad, torch.autograd.functional.jacobian) and functional_call take tensors, and "
    "tracing has only stand-ins for them; move the lines that make and call the transformed function into the forward of a "
    "module of its own, without a mark inside, and call that: it is called as a whole"
)
# A part of the message of Python or torch, and the reason to add.
_REASONS = (
    ("cannot be iterated", "tracing sees no values, so a loop over a tensor or an input cannot be followed"),
    ("control flow", "tracing sees no values, so an `if`, a `while` or a `bool()` on a tensor cannot be followed"),
    ("'len' is not supported", "tracing sees no values, so len() of one is unknown; use x.size(0)"),
    ("interpreted as an integer", "tracing sees no values, so range() or an index needs a number known beforehand"),
    ("int() of a traced value", "tracing sees no values, so int() of one is unknown"),
    ("float() of a traced value", "tracing sees no values, so float() of one is unknown"),
    ("complex() of a traced value", "tracing sees no values, so complex() of one is unknown"),
    ("__index__ returned non-int", "tracing sees no values, so range() or an index needs a number known beforehand"),
    ("real number", "tracing sees no values, so float() of one is unknown"),
    (
        "Variable data has to be a tensor",
        "assigning .data of a parameter cannot be recorded; change it in place under torch.no_grad(), as in "
        "parameter.mul_(0.99).add_(other, alpha=0.01)",
    ),
    *((clue, _TRANSFORM) for clue in ("transform API", "vmap(", "only contain Tensors", "must be either a Tensor or")),
    ("is not an instance of torch.Tensor", _TRANSFORM),
    ("as parameter", "assigning to a parameter cannot be recorded; change it in place under torch.no_grad()"),
)

_EXAMPLE = "What to do: if it asks for a size, give example_args or example_kwargs, so that sizes are known; or pass"
_ADVICE = (
    "What to do: pass the value as a constant with concrete_args={...} if it is an argument; or move this code into the "
    "forward of a module of its own, without a mark inside, which is called as a whole; or mark the function with "
    "torch.fx.wrap."
)


def explained(error: Exception, model: nn.Module, with_example: bool) -> TracingError:
    """The error to raise for ``error``, which the user's forward raised while it was traced."""
    advice = _ADVICE if with_example else _ADVICE.replace("What to do: pass", _EXAMPLE)
    text = str(error)
    if (cache := cache_in(text)) is not None:
        return CacheReturnedError(model, cache)
    reasons = [reason for clue, reason in _REASONS if clue in text]
    where = getattr(error, "source", None) or source.of_traceback(error.__traceback__, below="trace")
    lines = [f"cannot trace {type(model).__name__}: {type(error).__name__}: {text}"]
    lines += [where.excerpt()] if where else []
    lines += [f"Why: {reason}." for reason in reasons[:1]]
    says_it = isinstance(error, NotImplementedError) or reasons[:1] == [_TRANSFORM]
    lines += [] if says_it else [advice]
    return TracingError("\n".join(lines))


def check_model(model: object) -> None:
    """Refuse what is no module, and a module that does something outside of its forward, which is all that is traced."""
    if isinstance(model, type):
        raise TracingError(f"{model.__name__} is a class; give an instance of it: pipeline({model.__name__}(...))")
    if not isinstance(model, nn.Module):
        raise TracingError(
            f"this is a {type(model).__name__}, not an nn.Module; put the function in a module's forward"
        )
    if any(isinstance(value, Compiled) for value in model.__dict__.values()):
        raise TracingError("this is a Pipe already; give the model that it was made from")
    if hasattr(model, "validate_inputs") and type(model).__mro__[1].__module__.startswith("torch.export."):
        raise TracingError(
            f"this {type(model).__name__} was made by torch.export; give the ExportedProgram itself: pipeline(program, loss_fn)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TracingError(
            f"this {type(model).__name__} was made by torch.jit, and cannot be cut, because it is not Python code; "
            "give the module that it was made from. Parts of that module may be scripted: each is called as a whole"
        )
    for each in global_hooks():
        raise TracingError(
            f"torch.nn.modules.module.{each} has registered hooks for all modules, which workers would not have; "
            "remove them, or register hooks of single modules"
        )
    hooks = hooks_of(model)
    if hooks:
        raise TracingError(
            f"this {type(model).__name__} has hooks of its own ({', '.join(hooks)}), which no stage would call; "
            "remove them, or put the model inside a module that calls it"
        )


# Models of transformers return a cache of keys and values unless they are told not to; no stage can hand one to the next.
#
# It is for generation. So a model is traced with `use_cache=False` if the call does not say anything else:
#
#     forward(self, input_ids, use_cache=None, ...), and its config says True     at once
#     forward(self, input_ids, **kwargs), as of a wrapper                         if it returned a cache
#     the call itself says use_cache=True                                         refused
#
# The config stays as it is.


_NAME = "use_cache"


class CacheReturnedError(TracingError):
    """Forward returns its cache."""

    def __init__(self, model: nn.Module, cache: str) -> None:
        super().__init__(
            f"cannot trace {type(model).__name__}: forward returns its cache, a {cache}, which is for generation and cannot go "
            "from stage to stage.\nWhat to do: leave it out in training and evaluation, with model.config.use_cache = False "
            "before pipeline(), or with 'use_cache': False in example_kwargs"
        )


def cache_in(text: str) -> str | None:
    """The class of a cache of transformers that an error is about.

    >>> cache_in("argument of type: <class 'transformers.cache_utils.DynamicCache'>")
    'DynamicCache'
    """
    found = re.search(r"<class 'transformers\.cache_utils\.(\w+)'>", text)
    return found[1] if found else None


def calls_without_cache(
    model: nn.Module, example: Example | None, concrete_args: Mapping[str, Any] | None
) -> Iterator[Example | None]:
    """The examples to try, in order: usually the given one alone.

    If forward names `use_cache` and the model makes a cache, it is the same with `use_cache=False` instead. If only
    ``**kwargs`` may take `use_cache`, this comes after the given one.
    """
    if example is None or _is_said(model, example, concrete_args or {}):
        yield example
        return
    without = replace(example, kwargs={**example.kwargs, _NAME: False})
    parameters = signature_of(model).parameters
    if _NAME not in parameters:
        yield example
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            yield without
    else:
        yield without if _makes_cache(model) else example


def _is_said(model: nn.Module, example: Example, concrete_args: Mapping[str, Any]) -> bool:
    by_position = list(signature_of(model).parameters)[: len(example.args)]
    return _NAME in example.kwargs or _NAME in concrete_args or _NAME in by_position


def _makes_cache(model: nn.Module) -> bool:
    """Whether some part of the model has a config that asks for a cache."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, _NAME, False) is True for config in configs)


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

        def note(node: fx.Node) -> fx.Node:
            self._nodes.append(node)
            return node

        with then(self.tracer, "create_node", note):
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
