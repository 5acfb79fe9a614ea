"""Shows the progress of a training: by a bar of tqdm on a terminal or in a notebook, if it is installed, and else by lines."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from pippy.ir.base.terminals import is_muted, redraws
from pippy.training.result import StepReport

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
