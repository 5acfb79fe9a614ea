"""The result of `pippy.train`, the reports that callbacks get, and the checkpoints of a training.

A checkpoint says when it is due, what is in it, and how a run goes on from it.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pippy.drivers.base.errors import CheckpointError, DriverError
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.files.contents import checkpoints_in, contents_of
from pippy.drivers.report.step_data import StepData
from pippy.ir.base.public_calls import check_amount, check_count
from pippy.ir.base.trees import describe
from pippy.training.reader import Reader


@dataclass
class StepReport:
    """What a callback is given after each step: `step` counts from 1, `loss` is that of the step's mini-batch.

    ``norm`` is that of the gradients before they were clipped, if they were. ``rates`` are the learning rates that the step was
    made with, of each group of each optimizer. ``rows`` and ``tokens`` are those of the mini-batch. ``evaluation`` has the
    values of an evaluation that followed this step. In steps that are given to loggers, ``memory`` has the most bytes that each
    worker held, by its name, and ``idle`` the share of the step in which it did not compute. Call `stop` to end the training
    after this step.

    >>> report = StepReport(10, 0, 0.25, None, (0.1,), 64, None, 0.5)
    >>> report.stop()
    >>> report.stopped
    True
    """

    step: int
    epoch: int
    loss: float
    norm: float | None
    rates: tuple[float, ...]
    rows: int | None
    tokens: int | None
    seconds: float
    evaluation: dict[str, float] | None = None
    stopped: bool = False
    memory: dict[str, int] | None = None
    idle: dict[str, float] | None = None

    def stop(self) -> None:
        """End the training after this step: what is to be saved is saved."""
        self.stopped = True

    def note(self, step: StepData) -> None:
        """Take what the workers noted in this step."""
        self.memory = {name: each.memory for name, each in zip(step.workers, step.noted)}
        self.idle = dict(zip(step.workers, step.idle))

    def values(self) -> dict[str, float]:
        """The numbers of the step, by the names that they have in logs. What is not known is left out.

        >>> StepReport(10, 0, 0.25, 1.5, (0.1,), 64, None, 0.5, memory={"worker0": 3 << 19}, idle={"worker0": 0.125}).values()
        {'epoch': 0, 'loss': 0.25, 'gradient_norm': 1.5, 'learning_rate': 0.1, 'samples_per_second': 128.0, \
'memory_mib/worker0': 1.5, 'idle/worker0': 0.125}
        """
        rates = {f"learning_rate/{at}": rate for at, rate in enumerate(self.rates)}
        counts = {"samples_per_second": self.rows, "tokens_per_second": self.tokens}
        return {
            "epoch": self.epoch,
            "loss": self.loss,
            **({} if self.norm is None else {"gradient_norm": self.norm}),
            **({"learning_rate": self.rates[0]} if len(self.rates) == 1 else rates),
            **{name: count / self.seconds for name, count in counts.items() if count is not None},
            **{f"memory_mib/{worker}": held / 2**20 for worker, held in (self.memory or {}).items()},
            **{f"idle/{worker}": share for worker, share in (self.idle or {}).items()},
        }


@dataclass
class TrainingResult:
    """What a training gave. ``losses`` has the loss of each step from the first on, also of those before it was resumed.

    ``steps`` and ``epochs`` are how far the run has come; ``evaluations`` has the values by step; ``checkpoint`` is the path of
    the last one. ``resumed_at`` is the step at which this call went on, ``seconds`` how long it took, and ``recoveries`` how
    often it went on after a worker was lost.

    >>> TrainingResult(losses=[0.5, 0.25], steps=2)
    <TrainingResult: 2 steps, last loss 0.25>
    """

    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    steps: int = 0
    epochs: int = 0
    seconds: float = 0.0
    resumed_at: int = 0
    checkpoint: str | None = None
    recoveries: int = 0

    def __repr__(self) -> str:
        loss = f", last loss {self.losses[-1]:.4g}" if self.losses else ""
        evaluation = f", {list(self.evaluations.values())[-1]}" if self.evaluations else ""
        return f"<TrainingResult: {self.steps} steps{loss}{evaluation}>"

    def values(self) -> dict[str, Any]:
        """The part of the result that a checkpoint has, as plain values."""
        return {"losses": torch.tensor(self.losses, dtype=torch.float64), "evaluations": dict(self.evaluations)}

    def go_on(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Take the part of the result that a checkpoint has."""
        self.losses, self.evaluations = values["losses"].tolist(), dict(values["evaluations"])
        self.steps, self.epochs = step, epoch


TRAINING = "training"  # what a checkpoint has beside the states
_TAKEN = ("step", TRAINING, "model", "wait", "keep", "folder", "self")


@dataclass
class TrainingCheckpoints:
    """Where and when a training is saved. ``parts`` are the objects with a state, by name."""

    folder: str
    parts: Mapping[str, Any]
    every: int | None = None
    minutes: float | None = None
    keep: int | None = None
    resume: bool | str = True
    since: float = field(default_factory=time.monotonic)
    saved: int | None = None  # the step of the last one
    before: str | None = None  # the one before the last one

    def is_due(self, step: int) -> bool:
        """Whether the run is to be saved after this step."""
        by_steps = self.every is not None and step % self.every == 0
        return by_steps or (self.minutes is not None and time.monotonic() - self.since >= 60 * self.minutes)

    def save(self, driver: PipelineDriverBase, reader: Reader, result: TrainingResult, wait: bool) -> None:
        """Save, unless this step is saved already. Without ``wait`` it is written while training goes on."""
        if self.saved != result.steps:
            values = {TRAINING: {"data": reader.position(), **result.values()}}
            self.before = result.checkpoint
            result.checkpoint = driver.save(
                self.folder, wait=wait, keep=self.keep, step=result.steps, **values, **self.parts
            )
            self.saved, self.since = result.steps, time.monotonic()
        if wait:
            driver.saving.finish()

    def go_on(self, driver: PipelineDriverBase, reader: Reader, result: TrainingResult) -> None:
        """Go on from the checkpoint of the folder, if there is one."""
        driver.saving.finish()
        path = self._to_resume()
        if path is None:
            return
        values = contents_of(path).values.get("values", {})
        if TRAINING not in values:
            raise CheckpointError(
                f"{path} was not saved by train(), so it does not say how far the data was read; give a folder of its own, or "
                "resume=False after driver.load"
            )
        self._load(driver, path, reader, result)
        result.resumed_at = result.steps

    def recover(self, driver: PipelineDriverBase, reader: Reader, result: TrainingResult, fewer: bool) -> None:
        """Have lost workers replaced, and go back to the last checkpoint. With ``fewer``, none need be replaced."""
        values = driver.recover(fewer=fewer)
        if TRAINING in values:
            self._take(values, reader, result)
            return
        # A callback has made a point of its own.
        path = result.checkpoint
        if path is None or not os.path.exists(path):  # it was being written when the worker was lost
            path = self.before
        assert path is not None
        self._load(driver, path, reader, result)

    def _load(self, driver: PipelineDriverBase, path: str, reader: Reader, result: TrainingResult) -> None:
        values = contents_of(path).values["values"]
        driver.load(path, **self.parts)
        self._take(values, reader, result)
        result.checkpoint = path

    def _take(self, values: Mapping[str, Any], reader: Reader, result: TrainingResult) -> None:
        """Go to the position of a checkpoint with these values."""
        reader.go_to(values[TRAINING]["data"])
        result.go_on(values["step"], reader.epoch, values[TRAINING])
        self.saved, self.since = result.steps, time.monotonic()

    def _to_resume(self) -> str | None:
        if isinstance(self.resume, str):
            return self.resume
        there = checkpoints_in(self.folder) if self.resume and os.path.isdir(self.folder) else []
        return there[-1] if there else None


def checked_checkpoints(
    parts: Mapping[str, Any], folder: Any, every: Any, minutes: Any, keep: Any, resume: Any, also: Any
) -> TrainingCheckpoints | None:
    """The checkpoints; None if the arguments ask for none."""
    if folder is None:
        asked = {"save_every": every, "save_minutes": minutes, "keep": keep, "also": also}
        unused = [name for name, value in asked.items() if value is not None]
        if unused:
            raise DriverError(
                f"{unused[0]}= is an option of checkpoints, but there is no folder for them; give folder="
            )
        return None
    check_count("save_every", every, "after how many steps to save", DriverError, none="for never")
    check_count("keep", keep, "how many checkpoints to keep", DriverError, none="for all")
    check_amount("save_minutes", minutes, "after how many minutes to save", DriverError, none="for never")
    if not isinstance(resume, (bool, str, os.PathLike)):
        raise DriverError(f"resume={describe(resume)}: give True, False, or the path of a checkpoint")
    also = {} if also is None else dict(also)
    for name, value in also.items():
        if name in (*_TAKEN, *parts) or not isinstance(name, str):
            raise DriverError(
                f"also={{{name!r}: ...}}: a checkpoint stores a part of its own by that name; use another name"
            )
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise DriverError(
                f"also={{{name!r}: {describe(value)}}}: give objects with a state_dict() and a load_state_dict()"
            )
    resume = resume if isinstance(resume, bool) else os.fspath(resume)
    return TrainingCheckpoints(os.fspath(folder), {**parts, **also}, every, minutes, keep, resume)
