"""The loggers of one training: what they are given, and what becomes of one that fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.report.record import Recording
from pippy.ir.base import source
from pippy.training.loggers.logger import Logger
from pippy.training.result import StepReport


class TrainingLoggers:
    """Give each logger the values of every ``every``-th step, and those of evaluations.

    A logger that raises while the training goes on is told of by a warning, and is left out from then on.
    """

    def __init__(self, loggers: tuple[Logger, ...] = (), every: int = 1) -> None:
        self.loggers, self.every = list(loggers), every
        self._begun = False

    def begin(self, step: int) -> None:
        """The training goes on after this step. At its start, a logger that raises ends it."""
        for logger in list(self.loggers):
            begin: Callable[[int], Any] | None = getattr(logger, "begin", None)
            if begin is not None and self._begun:
                self._call(logger, begin, step)
            elif begin is not None:
                begin(step)
        self._begun = True

    @contextmanager
    def recorded(self, driver: PipelineDriverBase, step: int) -> Iterator[Recording | None]:
        """Inside, a step that is sent is recorded if its values are logged: its answers then tell what the workers did."""
        before = driver.steps.recording
        if not self._has(step) or before is not None:
            yield before if self._has(step) else None
            return
        driver.steps.recording = Recording(limit=1)
        try:
            yield driver.steps.recording
        finally:
            driver.steps.recording = before

    def log(self, report: StepReport) -> None:
        """Log a step, if its turn has come, and an evaluation after it in any case."""
        values = report.values() if self._has(report.step) else {}
        self._log(report.step, values)
        if report.evaluation:
            self.evaluated(report.step, report.evaluation)

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        """Log an evaluation."""
        self._log(step, {f"evaluation/{name}": value for name, value in values.items()})

    def close(self) -> None:
        """The training has ended."""
        for logger in list(self.loggers):
            self._call(logger, logger.close)

    def _has(self, step: int) -> bool:
        return bool(self.loggers) and step % self.every == 0

    def _log(self, step: int, values: dict[str, Any]) -> None:
        for logger in list(self.loggers) if values else ():
            self._call(logger, logger.log, step, dict(values))

    def _call(self, logger: Logger, method: Callable[..., Any], *given: Any) -> None:
        try:
            method(*given)
        except Exception as error:
            self.loggers.remove(logger)
            source.warn(
                f"{method.__name__}() of the logger {type(logger).__name__} raised {type(error).__name__}: {error}. The "
                "training goes on, and this logger gets nothing more"
            )
