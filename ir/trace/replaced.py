"""A method of one tracer, replaced while it traces. Several may replace the same one, each around what was there before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx


@contextmanager
def replaced(tracer: fx.Tracer, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which the tracer's method ``name`` is ``function``."""
    own = vars(tracer)
    before = {name: own[name]} if name in own else {}
    own[name] = function
    try:
        yield
    finally:
        del own[name]
        own.update(before)
