"""What torch.compile means for a Pipe: modules that it was called on, and the stance of `torch.compiler.set_stance`.

A Pipe traces the code inside of a compiled module; ``compile=`` of a driver compiles its stages.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def original_of(given: Any) -> Any:
    """The module or function that torch.compile was called on, which has its own names; anything else as it is.

    >>> import torch
    >>> net = nn.Linear(2, 2)
    >>> original_of(torch.compile(net)) is net, original_of(net) is net
    (True, True)
    """
    if isinstance(given, nn.Module):
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # what was not imported has compiled nothing
        inside = given._orig_mod if dynamo is not None and isinstance(given, dynamo.OptimizedModule) else given
    else:
        inside = getattr(given, "_torchdynamo_orig_callable", given)
    return given if inside is given else original_of(inside)


@contextmanager
def following_compiled() -> Iterator[None]:
    """A context in which torch.fx traces through compiled modules and functions, as if they were not. Else they raise."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return
    with dynamo.config.patch(error_on_nested_fx_trace=False):  # in this thread
        yield


DEFAULT, EAGER, KNOWN, FAIL = "default", "force_eager", "eager_on_recompile", "fail_on_recompile"


class _Entered(threading.local):
    stance: str | None = None


_entered = _Entered()


def compile_stance() -> str | None:
    """The stance that is in force here; None for the default one, and for those that compile all in the end.

    >>> with in_stance("force_eager"):
    ...     compile_stance()
    'force_eager'
    """
    stance = _entered.stance
    if stance is None:
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # what was not imported has no stance
        stance = DEFAULT if dynamo is None else dynamo._stance.stance
    return stance if stance in (EAGER, KNOWN, FAIL) else None


def forced_backend() -> bool:
    """Whether a stance forces another backend on all that is compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and dynamo._stance.backend is not None


@contextmanager
def in_stance(stance: str) -> Iterator[None]:
    """Inside, a stance is in force for the stages that this thread runs."""
    before = _entered.stance
    _entered.stance = stance
    try:
        yield
    finally:
        _entered.stance = before
