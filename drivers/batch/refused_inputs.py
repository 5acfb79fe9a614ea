"""Inputs that a step cannot have, wherever they are loaded."""

from collections.abc import Sequence
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.specs import MicroBatches
from pippy.ir.base.trees import describe, leaves, tensors


def refuse_inputs(inputs: Sequence[Any], trains: bool) -> None:
    """Raise if some of the inputs have no numbers, or require gradients that nobody would get."""
    pieces = [each.values if isinstance(each, MicroBatches) else each for each in leaves(inputs)]
    held = list(tensors(pieces))
    if any(tensor.is_nested and tensor.layout is torch.strided for tensor in held):
        raise DriverError(
            "an input is a nested tensor of layout torch.strided, which cannot be cut or sent; make it with "
            "torch.nested.nested_tensor(rows, layout=torch.jagged), or pad it"
        )
    empty = [describe(tensor) for tensor in held if tensor.is_meta]
    if empty:
        raise DriverError(
            f"an input, {empty[0]}, is on the meta device and holds no numbers; only memory() takes such an input, "
            "so give run() a tensor on another device"
        )
    wanting = [describe(tensor) for tensor in held if tensor.requires_grad]
    if wanting and trains:
        raise DriverError(
            f"an input, {wanting[0]}, requires a gradient, but run() does not return gradients of inputs; detach "
            "it, or make it a parameter of the model"
        )
