"""A method of one tracer, replaced while it traces. Several may replace the same one, each around what was there before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx


@contextmanager
def replaced(tracer: fx.Tracer, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which the tracer's method ``name`` is ``function``."""
    attributes = vars(tracer)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = function
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)
