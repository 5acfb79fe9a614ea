"""The argument ``slices`` of a driver: what cannot be combined with it, and what becomes of the Pipe."""

from collections.abc import Mapping
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.slices import SlicedCalls
from pippy.ir.base.brief import brief
from pippy.ir.base.trees import describe
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.sliced import sliced

_WHY = {
    "single_loss": "the loss over the whole mini-batch would need the outputs of all slices",
    "compile": "stages with slices run eagerly",
    "chunk_spec": "rows are along dimension 0, and sequences along dimension 1",
    "batch_dims": "rows are along dimension 0, and sequences along dimension 1",
    "output_spec": "outputs are joined along the rows and the sequences",
    "schedule": "it is not known how long each slice takes",
    "_debug_mask_minibatches": "every micro-batch would be the whole mini-batch",
}


def pipe_in_slices(pipe: Pipe, slices: Any, others: Mapping[str, Any]) -> tuple[Pipe, SlicedCalls | None]:
    """The Pipe that a driver with ``slices`` runs, and what divides its calls; without slices, the same Pipe, and None.

    ``others`` are arguments of the driver that do not go with slices, where they are given.

    >>> from torch import nn
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> pipe_in_slices(pipe, 1, {})[0] is pipe
    True
    >>> pipe_in_slices(pipe, 0, {})
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: slices=0: give into how many slices each sequence is cut, 1 or more
    """
    if not isinstance(slices, int) or isinstance(slices, bool) or slices < 1:
        raise DriverError(f"slices={describe(slices)}: give into how many slices each sequence is cut, 1 or more")
    if slices == 1:
        return pipe, None
    for name, value in others.items():
        if value:
            raise DriverError(
                f"slices={slices} and {name}={brief(value)} cannot be combined: {_WHY[name]}; leave one of them out"
            )
    return sliced(pipe), SlicedCalls(slices, compiled_of(pipe))
