"""A trace leaves the process as it was, whether it succeeds or is refused; what it reads of modules is noted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pippy.ir.trace.torch_state import leaving_torch_as_it_was
from pippy.ir.trace.tracing_thread import tracing_thread
from pippy.ir.trace.users_caches import leaving_users_caches


@contextmanager
def tracing(model: nn.Module) -> Iterator[dict[tuple[type, str], bool]]:
    """A context in which this thread traces ``model``, and after which torch and the user's code hold nothing of it.

    It gives the names of the attributes of modules that are read, there or not, with the classes of the modules.
    """
    with tracing_thread(), leaving_users_caches(model), leaving_torch_as_it_was(), _noting_reads() as reads:
        yield reads


@contextmanager
def _noting_reads() -> Iterator[dict[tuple[type, str], bool]]:
    reads: dict[tuple[type, str], bool] = {}
    read = object.__getattribute__

    def get(module: nn.Module, name: str) -> Any:  # it calls no function that the watch over calls would be told of
        reads[type(module), name] = True
        return read(module, name)

    nn.Module.__getattribute__ = get  # type: ignore[assignment]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__
