"""Models of transformers return a cache of keys and values unless they are told not to; no stage can hand one to the next.

It is for generation. So a model is traced with `use_cache=False` if the call does not say anything else:

    forward(self, input_ids, use_cache=None, ...), and its config says True     at once
    forward(self, input_ids, **kwargs), as of a wrapper                         if it returned a cache
    the call itself says use_cache=True                                         refused

The config stays as it is.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from pippy.ir.base.errors import TracingError
from pippy.ir.trace.arguments import Example, signature_of

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
