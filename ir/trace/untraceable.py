"""Refuses what symbolic tracing cannot follow, or would silently leave out. Each error has the line and a remedy."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.base.surroundings import global_hooks
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.model_watch import hooks_of
from pippy.ir.trace.arguments import Example, signature_of

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
