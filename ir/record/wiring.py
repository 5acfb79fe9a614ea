"""The inputs, outputs and values of the top-level graph, by name. The verifier checks that the graph has these."""

from dataclasses import dataclass
from typing import Any


class ValueName(str):
    """The name of a value, in a structure that may also contain constants."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Wiring:
    """``inputs`` are the placeholders, in order; ``outputs`` is what the model returns, each value as its name.

    ``values`` maps the name of each node of the top-level graph that is a value to the name of the value. A value has the
    name of its input, or of the node in its stage that makes it. The call of a stage with several outputs is no value;
    each of its `getitem` nodes is one.
    """

    inputs: tuple[str, ...]
    outputs: Any
    values: dict[str, str]
