"""`pippy.train`: the loop, as one function."""

from collections.abc import Iterable, Sequence
from typing import Any

from pippy.drivers.driver_arguments import check_chunks
from pippy.drivers.driver_base import PipelineDriverBase
from pippy.drivers.errors import DriverError
from pippy.ir.trees import describe
from pippy.training.loop import Callback, Loop
from pippy.training.options import Length, checked_updates
from pippy.training.reader import Reader
from pippy.training.result import TrainingResult


def train(
    driver: PipelineDriverBase,
    data: Iterable[Any],
    optimizer: Any,
    scheduler: Any = None,
    *,
    chunks: int | None,
    steps: int | None = None,
    epochs: int | None = None,
    accumulate: int = 1,
    max_norm: float | None = None,
    clip_value: float | None = None,
    scaler: Any = None,
    callbacks: Callback | Sequence[Callback] = (),
) -> TrainingResult:
    """Train the model of a driver: for so many ``steps`` (updates), or ``epochs`` of ``data``, or whatever ends first.

    ``data`` is read again and again: a DataLoader, a list, anything to iterate over. Each item is a mini-batch for
    ``driver.run(chunks, ...)``: a tuple of arguments, a dict of them by name, or one tensor. With ``accumulate=k`` a step
    takes k items, each in ``chunks`` micro-batches. Gradients are clipped to the norm ``max_norm``, or each element to
    ``clip_value``. ``optimizer`` and ``scheduler`` may be lists; a scheduler steps with each update. Callbacks are called with
    a `StepReport` after each step. See docs/loop.md.

    >>> import torch
    >>> from pippy import Pipe, PipelineDriver1F1B, cluster, train
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> data = [(torch.ones(4, 2), torch.ones(4, 1))]
    >>> with cluster(2, threads=1) as workers:
    ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), workers)
    ...     optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    ...     result = train(driver, data, optimizer, chunks=2, steps=10)
    >>> result.steps, result.losses[-1] < result.losses[0]
    (10, True)
    """
    updates = checked_updates(driver, optimizer, scheduler, scaler, max_norm, clip_value)
    length = Length.checked(steps, epochs, accumulate)
    check_chunks(chunks, driver._auto)
    return Loop(driver, Reader(data), updates, length, chunks, _checked_callbacks(callbacks)).run()


def _checked_callbacks(given: Any) -> Sequence[Callback]:
    callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
    for each in callbacks:
        if not callable(each):
            raise DriverError(f"callbacks={describe(each)}: give a function that takes a StepReport, or a list of such")
    return callbacks
