"""What the top-level graph was made to take and to give, by the names of the values. The verifier holds it to that."""

from dataclasses import dataclass
from typing import Any


class ValueName(str):
    """The name of a value, where a constant could stand too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Wiring:
    """``inputs`` are the placeholders, in order; ``outputs`` is what the model returns, each value as its name.

    ``values`` has the name of every value by the node of the top-level graph that stands for it. A value has the name of
    its input, or of the node in its stage that makes it. A stage with several outputs stands for no value, and the
    `getitem` nodes that take its outputs out stand for one each.
    """

    inputs: tuple[str, ...]
    outputs: Any
    values: dict[str, str]
