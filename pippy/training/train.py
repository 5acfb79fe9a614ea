"""`pippy.train`: the loop, as one function."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pippy.drivers.base.errors import DriverError
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.driver.steps.arrangement import check_fewer
from pippy.drivers.driver.steps.driver_arguments import check_chunks
from pippy.drivers.driver.steps.updates import Updates, checked_updates
from pippy.ir.base.public_calls import check_count, placing_words
from pippy.ir.base.trees import describe
from pippy.training.evaluation import Evaluation, Metric
from pippy.training.loggers import Logger, TrainingLoggers, checked_loggers
from pippy.training.loop import Callback, Length, Loop, check_driver
from pippy.training.reader import Reader, RepeatingLoader
from pippy.training.result import TrainingCheckpoints, TrainingResult, checked_checkpoints


@placing_words("pippy.train(driver, data, optimizer, chunks=4, steps=100)")
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
    folder: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    save_minutes: float | None = None,
    keep: int | None = None,
    resume: bool | str | os.PathLike[str] = True,
    also: Mapping[str, Any] | None = None,
    eval_data: Iterable[Any] | None = None,
    eval_every: int | None = None,
    metric: Metric | None = None,
    max_recoveries: int = 0,
    fewer: bool = False,
    check: bool = False,
    progress: bool = True,
    loggers: Logger | Sequence[Logger] = (),
    log_every: int = 1,
) -> TrainingResult:
    """Train the model of a driver: for so many ``steps`` (updates), or ``epochs`` of ``data``, or whatever ends first.

    ``data`` is read again and again: a DataLoader, a list, anything to iterate over. Each item is a mini-batch for
    ``driver.run(chunks, ...)``: a tuple of arguments, a dict of them by name, or one tensor. With ``accumulate=k`` a step
    takes k items, each in ``chunks`` micro-batches. Gradients are clipped to the norm ``max_norm``, or each element to
    ``clip_value``. ``optimizer`` and ``scheduler`` may be lists; a scheduler steps with each update. Callbacks are called with
    a `StepReport` after each step. ``loggers``, as `CSVLogger`, are given the numbers of every ``log_every``-th step.

    With ``check=True``, the first item of data is given to `driver.check` before the first step: if the workers have not the
    numbers of the plain model, that is a `CheckError` with the table.

    With ``eval_data``, the model is evaluated every ``eval_every`` steps, and at the end, as by `pippy.evaluate`. ``progress``
    shows a bar, or lines on stderr.

    With ``folder``, checkpoints are saved there: every ``save_every`` steps, every ``save_minutes`` minutes, at the end, and
    when Ctrl-C ends the training. The ``keep`` newest are kept. A call goes on from the newest one that is there; ``resume``
    can be False, or the path of another. ``also`` names further objects with a state to save. If a worker is
    lost, the training goes on from the last checkpoint by itself, up to ``max_recoveries`` times; with ``fewer=True`` on the
    workers that are left, if no other process can be started. See docs/loop.md.

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
    check_driver(driver, "train")
    updates = checked_updates(driver, optimizer, scheduler, scaler, max_norm, clip_value)
    length = Length.checked(steps, epochs, accumulate)
    check_chunks(chunks, driver._auto)
    checkpoints = checked_checkpoints(updates.parts(), folder, save_every, save_minutes, keep, resume, also)
    evaluation = _checked_evaluation(driver, eval_data, chunks, metric, eval_every, updates)
    if isinstance(data, RepeatingLoader) and steps is None:
        raise DriverError(f"epochs={epochs}: a RepeatingLoader has no end; give steps=, or the data without it")
    reader, called = Reader(data), _checked_callbacks(callbacks)
    check_count("log_every", log_every, "after how many steps to log", DriverError)
    to_log = TrainingLoggers(checked_loggers(loggers), log_every)
    _check_recoveries(max_recoveries, fewer, checkpoints, reader)
    return Loop(
        driver,
        reader,
        updates,
        length,
        chunks,
        called,
        checkpoints,
        evaluation,
        eval_every,
        bool(progress),
        max_recoveries,
        fewer,
        bool(check),
        to_log,
    ).run()


def _check_recoveries(most: Any, fewer: Any, checkpoints: TrainingCheckpoints | None, reader: Reader) -> None:
    check_fewer(fewer)
    if fewer and not most:
        raise DriverError("fewer=True says how a training recovers; say how often it may: max_recoveries=")
    check_count("max_recoveries", most, "how often a lost worker may be replaced", DriverError, least=0)
    if most and checkpoints is None:
        raise DriverError(
            f"max_recoveries={most}: a training goes on from its last checkpoint, and there are none; give folder= and "
            "save_every="
        )
    if most and reader.reads_once:
        raise DriverError(
            f"max_recoveries={most}: data={describe(reader.data)} is an iterator, and what was read of it cannot be read "
            "again; give a list, a DataLoader or the like"
        )


def _checked_evaluation(
    driver: PipelineDriverBase, data: Any, chunks: int | None, metric: Metric | None, every: Any, updates: Updates
) -> Evaluation | None:
    if data is None:
        unused = [name for name, value in (("eval_every", every), ("metric", metric)) if value is not None]
        if unused:
            raise DriverError(
                f"{unused[0]}= is an option of evaluations, but there is no data for them; give eval_data="
            )
    check_count("eval_every", every, "after how many steps to evaluate", DriverError, none="for never")
    if every is None and any(isinstance(each, ReduceLROnPlateau) for each in updates.schedulers):
        raise DriverError(
            "ReduceLROnPlateau needs the loss of evaluations, and there are none; give eval_data= and eval_every="
        )
    if data is None:
        return None
    if every is not None and isinstance(data, Iterator):
        raise DriverError(
            f"eval_data={describe(data)} is an iterator, and can be read once; give a list, a DataLoader or the like"
        )
    return Evaluation(driver, data, chunks, metric, "eval_data")


def _checked_callbacks(given: Any) -> Sequence[Callback]:
    callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
    for each in callbacks:
        if not callable(each):
            raise DriverError(f"callbacks={describe(each)}: give a function that takes a StepReport, or a list of such")
    return callbacks
