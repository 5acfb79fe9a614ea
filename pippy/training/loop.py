"""The steps of a training, one after the other, and their progress: a bar of tqdm in a terminal or a notebook, or else lines.

    items of data ──▶ driver.run_async ──▶ clip, optimizer.step, scheduler.step, zero_grad ──▶ callbacks
                           │ while the workers compute
                           └──▶ the next items are read

Nothing is read ahead where the run may stop: its position in the data is then that of the step.
"""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from pippy.drivers.base.errors import CheckError, DriverError, WorkerLostError
from pippy.drivers.base.interrupts import first_waits
from pippy.drivers.batch.items import call_of_items
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.driver.steps.updates import Updates, check_trains, loss_alone
from pippy.drivers.report.step_data import TOKEN_DTYPES
from pippy.ir.base import source
from pippy.ir.base.logs import is_muted, redraws
from pippy.ir.base.public_calls import check_count
from pippy.ir.base.readable import count_with_noun
from pippy.ir.base.trees import tensors
from pippy.training.evaluation import Evaluation
from pippy.training.loggers import TrainingLoggers
from pippy.training.reader import DataPosition, Reader, may_read_ahead
from pippy.training.result import StepReport, TrainingCheckpoints, TrainingResult

# Checks the arguments of `pippy.train` before anything runs.


def check_driver(driver: Any, what: str) -> None:
    """Raise unless this is a driver that can train, and gradients are on."""
    if not isinstance(driver, PipelineDriverBase):
        raise DriverError(
            f"{what}() trains the model of a driver, and this is a {type(driver).__name__}; give a driver, as in "
            f"pippy.{what}(PipelineDriver1F1B(pipe, workers), data, optimizer, chunks=4, steps=100)"
        )
    check_trains(driver, what)


@dataclass(frozen=True)
class Length:
    """The length of a training: so many steps, or so many epochs, whichever ends first. A step takes ``accumulate`` items."""

    steps: int | None
    epochs: int | None
    accumulate: int = 1

    @classmethod
    def checked(cls, steps: Any, epochs: Any, accumulate: Any) -> "Length":
        """The length, with checked arguments."""
        if steps is None and epochs is None:
            raise DriverError(
                "the length of the training is missing; give steps=, the number of updates, or epochs=, how often "
                "data is read"
            )
        check_count("steps", steps, "the number of updates", DriverError, none="for no limit")
        check_count("epochs", epochs, "how often data is read", DriverError, none="for no limit")
        check_count("accumulate", accumulate, "how many mini-batches an update has", DriverError)
        return cls(steps, epochs, accumulate)

    def total(self, data: Any) -> int | None:
        """The number of steps, if it is known.

        >>> Length(None, 3, 2).total([1, 2, 3]), Length(5, 3, 2).total([1, 2, 3]), Length(None, 1).total(iter([1]))
        (6, 5, None)
        """
        found = [] if self.steps is None else [self.steps]
        if self.epochs is not None and hasattr(data, "__len__"):
            with suppress(TypeError):  # a DataLoader of a stream
                found.append(self.epochs * -(-len(data) // self.accumulate))
        return min(found, default=None)

    def is_over(self, step: int, epoch: int) -> bool:
        """Whether the training ends after this step and epoch.

        >>> Length(10, None).is_over(10, 0), Length(10, 3).is_over(5, 2)
        (True, False)
        """
        return (self.steps is not None and step >= self.steps) or (self.epochs is not None and epoch >= self.epochs)


Callback = Callable[[StepReport], Any]


_PAUSE = 10.0  # seconds between two lines


class TrainingProgress:
    """Shows nothing; its subclasses show something. ``total`` is the number of steps, if it is known."""

    def __init__(self, total: int | None, done: int) -> None:
        self.total, self.done = total, done

    def show(self, report: StepReport) -> None:
        """Show a step that is done."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Show an evaluation after a step."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.say(f"step {step}: evaluation {numbers}")

    def say(self, text: str) -> None:
        """Write a line."""

    def end(self) -> None:
        """End the display."""


class Lines(TrainingProgress):
    """A line on stderr every ten seconds, and for the last step."""

    def __init__(self, total: int | None, done: int) -> None:
        super().__init__(total, done)
        self._rates, self._shown = Rates(), time.monotonic()
        self._last: StepReport | None = None

    def show(self, report: StepReport) -> None:
        self._rates.add(report)
        self._last = report
        if time.monotonic() - self._shown >= _PAUSE:
            self._write()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._last is not None:
            self._write()

    def _write(self) -> None:
        report, self._last, self._shown = self._last, None, time.monotonic()
        if report is not None:
            of = "" if self.total is None else f"/{self.total}"
            numbers = ", ".join(f"{name} {value}" for name, value in self._rates.numbers(report).items())
            self.say(f"step {report.step}{of}: {numbers}")


class Bar(TrainingProgress):
    """A bar of tqdm's."""

    def __init__(self, total: int | None, done: int, tqdm: Any) -> None:
        super().__init__(total, done)
        unwatched = type("Unwatched", (tqdm,), {"monitor_interval": 0})  # no thread of its own
        self._bar, self._rates = unwatched(total=total, initial=done, unit="step", dynamic_ncols=True), Rates()

    def show(self, report: StepReport) -> None:
        self._rates.add(report)
        if self._bar.update(report.step - self._bar.n):
            self._bar.set_postfix(self._rates.numbers(report), refresh=False)

    def say(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)

    def end(self) -> None:
        self._bar.close()


class Rates:
    """The loss, and samples and tokens per second since the last call of `numbers`."""

    def __init__(self) -> None:
        self._since, self._rows, self._tokens = time.perf_counter(), 0, 0

    def add(self, report: StepReport) -> None:
        """Count a step."""
        self._rows += report.rows or 0
        self._tokens += report.tokens or 0

    def numbers(self, report: StepReport) -> dict[str, str]:
        """The numbers to show, as text."""
        now = time.perf_counter()
        seconds, counts = max(now - self._since, 1e-9), {"samples/s": self._rows, "tokens/s": self._tokens}
        self._since, self._rows, self._tokens = now, 0, 0
        return {"loss": f"{report.loss:.4g}"} | {
            name: f"{count / seconds:,.0f}" for name, count in counts.items() if count
        }


def progress_of(wanted: bool, total: int | None, done: int) -> TrainingProgress:
    """The object that shows the progress of a training.

    >>> type(progress_of(False, 10, 0)).__name__
    'TrainingProgress'
    """
    if not wanted or is_muted() or sys.stderr is None:
        return TrainingProgress(total, done)
    if not (redraws(sys.stderr) or _in_notebook()):
        return Lines(total, done)
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return Lines(total, done)
    return Bar(total, done, tqdm)


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; that ipykernel was imported does not say so."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


@dataclass(frozen=True)
class Fetched:
    """Items that were read, or the exception from reading them; and the position of the reader before."""

    before: DataPosition
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
        checkpoints: TrainingCheckpoints | None = None,
        evaluation: Evaluation | None = None,
        eval_every: int | None = None,
        progress: bool = False,
        max_recoveries: int = 0,
        fewer: bool = False,
        check: bool = False,
        loggers: TrainingLoggers | None = None,
    ) -> None:
        self.driver, self.reader, self.updates, self.length = driver, reader, updates, length
        self.chunks, self.callbacks, self.checkpoints = chunks, callbacks, checkpoints
        self.evaluation, self.eval_every, self.shows = evaluation, eval_every, progress
        self.max_recoveries, self.fewer, self.check, self.result = max_recoveries, fewer, check, TrainingResult()
        self.loggers, self.reads_ahead = loggers or TrainingLoggers(), may_read_ahead(driver)
        self.has_tokens = any(isinstance(each, nn.Embedding) for each in driver.pipe.modules())

    def run(self) -> TrainingResult:
        """Train to the end. The first Ctrl-C lets the step end, and has it saved."""
        began, ended = time.perf_counter(), False
        try:
            with _first_ctrl_c_waits() as came:
                self._train(came)
                self.result.seconds = time.perf_counter() - began
                ended = True
        except KeyboardInterrupt as interrupt:
            if ended:
                raise KeyboardInterrupt(self._ended_by_ctrl_c()) from None
            self.driver.session.give_up(interrupt)
            raise
        except Exception as error:
            self._end_saving(error)
            raise
        return self.result

    def _ended_by_ctrl_c(self) -> str:
        saved = ", and is not saved: no folder= was given"
        if self.result.checkpoint is not None:
            saved = f", saved as {self.result.checkpoint}; the same call goes on from there"
        return f"training ended by Ctrl-C after step {self.result.steps}{saved}"

    def _train(self, came: list[Any]) -> None:
        if self.checkpoints is not None:
            self.checkpoints.go_on(self.driver, self.reader, self.result)
        self.driver.zero_grad()
        if self.max_recoveries and self.checkpoints is not None and not self.result.steps:
            self._save(wait=True)  # a point to go back to
        if all(not each.training for each in self.driver.pipe.modules() if not any(each.children())):
            self.driver.train()  # from_pretrained gives a model in evaluation mode
        total = self.length.total(self.reader.data)
        try:
            self.loggers.begin(self.result.steps)
            progress = progress_of(self.shows, total, self.result.steps)
            try:
                while not self._has_ended(came, progress):
                    pass
            finally:
                progress.end()
        finally:
            self.loggers.close()

    def _has_ended(self, came: list[Any], progress: TrainingProgress) -> bool:
        """Train to the end. If a worker is lost, go back to the last checkpoint, and return False."""
        try:
            self._steps(came, progress)
            if self.evaluation is not None and not came and not self.result.evaluations.get(self.result.steps):
                self.loggers.evaluated(self.result.steps, self._evaluated(progress))
            if self.result.steps:
                self._save(wait=True)
        except WorkerLostError as lost:
            self._recover(lost, progress)
            return False
        return True

    def _recover(self, lost: WorkerLostError, progress: TrainingProgress) -> None:
        before = len(self.driver.ranks)
        while self.result.recoveries < self.max_recoveries:
            self.result.recoveries += 1
            assert self.checkpoints is not None
            try:
                self.checkpoints.recover(self.driver, self.reader, self.result, self.fewer)
            except WorkerLostError as another:
                lost = another
                continue
            self.loggers.begin(self.result.steps)
            now = len(self.driver.ranks)
            fewer = f" with {count_with_noun(now, 'worker')}" * (now < before)
            progress.say(
                f"worker {lost.worker!r} was lost: {lost.how}; the training goes on from step {self.result.steps}{fewer}"
            )
            return
        raise lost

    def _steps(self, came: list[Any], progress: TrainingProgress) -> None:
        fetched: Fetched | None = None
        while not came:
            fetched = fetched or self._fetched()
            if came and fetched.error is not None:  # as of a loader whose processes Ctrl-C has ended
                self.reader.go_back(fetched.before)
                return
            items = fetched.get()
            if not items:
                return
            if self.check:
                self._checked(items[0], progress)
            report, fetched = self._step(items, came)
            progress.show(report)
            if self._evaluates():
                report.evaluation = self._evaluated(progress)
                self.updates.evaluated(report.evaluation)
            self.loggers.log(report)
            with self.driver.copied_when_read():
                for callback in self.callbacks:
                    callback(report)
            if fetched is None and self._is_due():
                self._save(wait=False)
            if report.stopped:
                break
        if fetched is not None and fetched.items:  # they were read ahead, and are not used
            self.reader.go_back(fetched.before)

    def _checked(self, item: Any, progress: TrainingProgress) -> None:
        """Check a step of this item, once. Raises if it differs from the plain model's."""
        call = call_of_items([item], self.chunks)
        report = self.driver.check(*(() if call.chunks is None else (call.chunks,)), *call.args, **call.kwargs)
        if not report:
            raise CheckError(report)
        progress.say(str(report))
        self.check = False

    def _evaluates(self) -> bool:
        """Whether an evaluation follows the step that was sent last."""
        return self.eval_every is not None and self.result.steps % self.eval_every == 0

    def _evaluated(self, progress: TrainingProgress) -> dict[str, float]:
        assert self.evaluation is not None
        values = self.result.evaluations[self.result.steps] = self.evaluation.run()
        progress.evaluated(self.result.steps, values)
        return values

    def _is_due(self) -> bool:
        """Whether the run is saved after the step that was sent last."""
        return self.checkpoints is not None and self.checkpoints.is_due(self.result.steps)

    def _save(self, wait: bool) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(self.driver, self.reader, self.result, wait)

    def _end_saving(self, error: Exception) -> None:
        """Wait for a checkpoint that is being written, so that the run can go on from it."""
        try:
            self.driver.saving.finish()
        except Exception as other:
            error.add_note(f"beside that: {type(other).__name__}: {other}")

    def _fetched(self) -> Fetched:
        """The items of the next step; empty at the end of the training."""
        before = self.reader.place()
        try:
            while not self._is_over():
                items = self.reader.take(self.length.accumulate)
                if items:
                    return Fetched(before, items)
                self.result.epochs = self.reader.epoch
        except Exception as error:
            return Fetched(before, [], error)
        return Fetched(before, [])

    def _is_over(self) -> bool:
        over = self.length.is_over(self.result.steps, self.reader.epoch)
        if self.reader.ended and not over:
            source.warn(
                f"{self.reader.name} ended after step {self.result.steps}, before the training did, and cannot be read again: "
                "it is an iterator; give a list, a DataLoader or the like"
            )
        return over or self.reader.ended

    def _step(self, items: list[Any], came: list[Any]) -> tuple[StepReport, Fetched | None]:
        """Make one update. Returns the items of the next one, if they were read while the workers computed."""
        since = time.perf_counter()
        call = call_of_items(items, self.chunks)
        epoch, rates = self.reader.epoch, self.updates.rates()
        with self.loggers.recorded(self.driver, self.result.steps + 1) as recording:
            running = self.driver.run_async(call.chunks, *call.args, **loss_alone(self.driver), **call.kwargs)
        self.result.steps += 1
        stops = came or self._is_due() or self._evaluates()
        fetched = None if stops or not self.reads_ahead else self._fetched()
        norm = self.updates.apply(self.driver)
        loss = float(running.result())
        self.result.losses.append(loss)
        seconds, tokens = time.perf_counter() - since, _tokens(items) if self.has_tokens else None
        report = StepReport(self.result.steps, epoch, loss, norm, rates, running.rows, tokens, seconds)
        if recording is not None:
            report.note(recording.steps[-1])
        return report, fetched


def _first_ctrl_c_waits() -> AbstractContextManager[list[Any]]:
    """Inside, the first Ctrl-C ends the training after its step, unless the script has a handler of its own."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return first_waits()
    return nullcontext([])


def _tokens(items: Sequence[Any]) -> int | None:
    """How many tokens there are: the whole numbers in the first argument that has rows of them."""
    total = 0
    for item in items:
        found = next((each for each in tensors(item) if each.dim() == 2 and each.dtype in TOKEN_DTYPES), None)
        total += 0 if found is None else found.numel()
    return total or None
