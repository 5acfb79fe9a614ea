"""The steps of a training, one after the other.

    items of data ──▶ driver.run_async ──▶ clip, optimizer.step, scheduler.step, zero_grad ──▶ callbacks
                           │ while the workers compute
                           └──▶ the next items are read

Nothing is read ahead where the run may stop: its position in the data is then that of the step.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.batches.items import call_of
from pippy.drivers.driver_base import PipelineDriverBase
from pippy.ir import source
from pippy.ir.names import LOSS
from pippy.ir.trees import tensors
from pippy.training.options import Length, Updates
from pippy.training.reader import Reader
from pippy.training.result import StepReport, TrainingResult

Callback = Callable[[StepReport], Any]


@dataclass(frozen=True)
class Fetched:
    """Items that were read, or what reading them raised."""

    items: list[Any]
    error: Exception | None = None

    def get(self) -> list[Any]:
        """The items."""
        if self.error is not None:
            raise self.error
        return self.items


class Loop:
    """One training of a driver."""

    def __init__(
        self,
        driver: PipelineDriverBase,
        reader: Reader,
        updates: Updates,
        length: Length,
        chunks: int | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.driver, self.reader, self.updates, self.length = driver, reader, updates, length
        self.chunks, self.callbacks = chunks, callbacks
        self.result = TrainingResult()
        # The whole of what a model returns beside its loss stays on the workers.
        self.outputs = None if LOSS in driver.compiled.split_gm._modules else False
        self.reads_ahead = _controller_only(driver)

    def run(self) -> TrainingResult:
        """Train to the end."""
        began = time.perf_counter()
        self.driver.zero_grad()
        fetched: Fetched | None = None
        while items := (fetched or self._fetched()).get():
            since = time.perf_counter()
            report, fetched = self._step(items)
            report.seconds = time.perf_counter() - since
            self.result.seconds = time.perf_counter() - began
            for callback in self.callbacks:
                callback(report)
            if report.stopped:
                break
        return self.result

    def _fetched(self) -> Fetched:
        """The items of the next step; none if the training is at its end."""
        try:
            while not self._is_over():
                items = self.reader.take(self.length.accumulate)
                if items:
                    return Fetched(items)
                self.result.epochs = self.reader.epoch
        except Exception as error:
            return Fetched([], error)
        return Fetched([])

    def _is_over(self) -> bool:
        over = self.length.is_over(self.result.steps, self.reader.epoch)
        if self.reader.ended and not over:
            source.warn(
                f"{self.reader.name} ended after step {self.result.steps}, before the training did, and cannot be read again: "
                "it is an iterator; give a list, a DataLoader or the like"
            )
        return over or self.reader.ended

    def _step(self, items: list[Any]) -> tuple[StepReport, Fetched | None]:
        """One update. Gives the items of the next one, if they were read while the workers computed."""
        call = call_of(items, self.chunks)
        epoch, rates = self.reader.epoch, self.updates.rates()
        outputs = {} if self.outputs is None else {"outputs": self.outputs}
        running = self.driver.run_async(call.chunks, *call.args, **outputs, **call.kwargs)
        self.result.steps += 1
        fetched = self._fetched() if self.reads_ahead else None
        norm = self.updates.apply(self.driver)
        loss = float(running.result())
        self.result.losses.append(loss)
        return StepReport(self.result.steps, epoch, loss, norm, rates, running.rows, _tokens(items), 0.0), fetched


def _controller_only(driver: PipelineDriverBase) -> bool:
    """Whether this process has no stages. One that has draws their random numbers, and data may draw from the same."""
    return all(driver.cluster.control.workers[rank].pid != os.getpid() for rank in driver.ranks)


def _tokens(items: Sequence[Any]) -> int | None:
    """How many tokens there are: the whole numbers in the first argument that has rows of them."""
    total = 0
    for item in items:
        found = next(
            (each for each in tensors(item) if each.dim() == 2 and each.dtype in (torch.int64, torch.int32)), None
        )
        total += 0 if found is None else found.numel()
    return total or None
