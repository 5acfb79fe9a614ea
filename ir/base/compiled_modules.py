"""Modules that torch.compile was called on: a Pipe traces the code inside; ``compile=`` of a driver compiles its stages."""

import sys
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
