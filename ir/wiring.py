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
    """``inputs`` are the placeholders, in order; ``outputs`` is what the model returns, each value as its name."""

    inputs: tuple[str, ...]
    outputs: Any
