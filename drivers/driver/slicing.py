"""The argument ``slices`` of a driver: what cannot be combined with it, and what becomes of the Pipe."""

from dataclasses import replace
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.slices import SlicedCalls, count_next_labels
from pippy.drivers.driver.step_runner import StepSettings
from pippy.ir.base.brief import brief
from pippy.ir.base.checked import check_count
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.sliced import sliced

_DIMENSIONS = "rows are along dimension 0, and sequences along dimension 1"
_WHY = {
    "single_loss": "the loss over the whole mini-batch would need the outputs of all slices",
    "chunk_spec": _DIMENSIONS,
    "batch_dims": _DIMENSIONS,
    "output_spec": "outputs are joined along the rows and the sequences",
    "mask": "every micro-batch would be the whole mini-batch",
    "compile": "stages with slices run eagerly",
    "schedule": "it is not known how long each slice takes",
}


def in_slices_of(
    pipe: Pipe, slices: Any, settings: StepSettings, compile: Any, auto: Any
) -> tuple[Pipe, StepSettings, SlicedCalls | None]:
    """The Pipe that a driver with ``slices`` runs, its settings, and what divides its calls.

    Without slices these are those that are given, and None. ``auto`` is what chooses the schedule, if anything does.

    >>> from torch import nn
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> settings = StepSettings(None, None, None, None, single_loss=False, mask=False, timeout=None)
    >>> in_slices_of(pipe, 1, settings, compile=None, auto=None)[0] is pipe
    True
    >>> in_slices_of(pipe, 0, settings, compile=None, auto=None)
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: slices=0: give into how many slices each sequence is cut, 1 or more
    """
    check_count("slices", slices, "into how many slices each sequence is cut", DriverError)
    if slices == 1:
        return pipe, settings, None
    given = {**vars(settings), "compile": compile, "schedule": auto and "auto"}
    for name, why in _WHY.items():
        if given[name]:
            raise DriverError(
                f"slices={slices} and {name}={brief(given[name])} cannot be combined: {why}; leave one of them out"
            )
    calls = SlicedCalls(slices, compiled_of(pipe))
    counts = calls.makes_loss and settings.loss_reduction is None
    return sliced(pipe), replace(settings, loss_reduction=count_next_labels) if counts else settings, calls
