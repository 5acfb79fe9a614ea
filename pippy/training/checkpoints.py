"""The checkpoints of a training: when one is due, what is in it, and how a run goes on from one."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pippy.drivers.base.errors import CheckpointError, DriverError
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.files.contents import contents_of
from pippy.drivers.files.run_folder import checkpoints_in
from pippy.ir.base.checked import check_amount, check_count
from pippy.ir.base.trees import describe
from pippy.training.reader import Reader
from pippy.training.result import TrainingResult

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
