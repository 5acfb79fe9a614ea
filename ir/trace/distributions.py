"""The distributions of torch look whether their parameters are valid, and the values whose density is asked for.

Tracing knows no numbers. It takes for granted that all are valid; a `check_all_true` node raises in the stage if it is not so.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.distributions import Distribution

from pippy.ir.base import source
from pippy.ir.run.functions import check_all_true
from pippy.ir.trace.tracing_thread import method_patched_here, patched_here


@contextmanager
def recording_distributions(tracer: fx.Tracer) -> Iterator[None]:
    """A context in which a distribution can be made of traced values, and asked for the density of one."""
    ask = _asked_in_the_stage(tracer, torch._is_all_true)
    validate = Distribution._validate_sample

    def validate_sample(distribution: Distribution, value: Any) -> None:
        if not issubclass(type(value), fx.Proxy):
            validate(distribution, value)
        elif isinstance(support := _support(distribution), torch.distributions.constraints.Constraint):
            ask(support.check(value))

    with (
        patched_here(torch, "_is_all_true", ask),
        method_patched_here(Distribution, "_validate_sample", validate_sample),
    ):
        yield


def _support(distribution: Distribution) -> Any:
    try:
        return distribution.support
    except NotImplementedError:
        return None


def _asked_in_the_stage(tracer: fx.Tracer, all_true: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def ask(valid: Any) -> Any:
        if not issubclass(type(valid), fx.Proxy):
            return all_true(valid)
        line = str(source.of_frame(sys._getframe(1)) or "")
        tracer.create_proxy("call_function", check_all_true, (valid, line), {})
        return True

    return ask
