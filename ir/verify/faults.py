"""`Fault`: what is wrong with a compiled model, and at which node."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import fx

from pippy.ir.record.compiled import Compiled


class Fault(NamedTuple):
    """A violation of a rule, and the node of the top-level graph that violates it, or None."""

    node: fx.Node | None
    message: str


FoundFaults = Iterator[Fault]


def examined(check: Callable[[Compiled], FoundFaults], compiled: Compiled) -> FoundFaults:
    """The faults that ``check`` finds. If it raises, because the graph is too broken to be read, that is a fault too."""
    try:
        yield from check(compiled)
    except Exception as error:  # a malformed graph can raise anything
        yield Fault(None, f"cannot be checked: {type(error).__name__}: {error}")
