"""A trace leaves the process as it was, whether it succeeds or is refused."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from pippy.ir.trace.torch_state import leaving_torch_as_it_was
from pippy.ir.trace.tracing_thread import tracing_thread
from pippy.ir.trace.users_caches import leaving_users_caches


@contextmanager
def tracing(model: nn.Module) -> Iterator[None]:
    """A context in which this thread traces ``model``, and after which torch and the user's code hold nothing of it."""
    with tracing_thread(), leaving_users_caches(model), leaving_torch_as_it_was():
        yield
