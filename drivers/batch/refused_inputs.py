"""Inputs that a step cannot have, wherever they are loaded."""

from collections.abc import Sequence
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.trees import describe, tensors


def refuse_inputs(given: Sequence[Any], trains: bool) -> None:
    """Raise if some of the inputs have no numbers, or require gradients that nobody would get."""
    held = list(tensors(given))
    empty = [describe(tensor) for tensor in held if tensor.is_meta]
    if empty:
        raise DriverError(
            f"an input, {empty[0]}, is on the meta device and has no numbers; memory() takes it, and run() needs a real one"
        )
    wanting = [describe(tensor) for tensor in held if tensor.requires_grad]
    if wanting and trains:
        raise DriverError(
            f"an input, {wanting[0]}, requires a gradient, and the gradients of inputs stay on the workers; detach it, or "
            "make it a parameter of the model"
        )
