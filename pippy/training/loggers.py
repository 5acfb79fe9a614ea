"""Loggers write the numbers of a training to files: CSV, TensorBoard, Weights & Biases, or one of the script's own."""

import csv
import importlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.report.record import Recording
from pippy.ir.base import source
from pippy.ir.base.trees import describe
from pippy.training.result import StepReport

# What `pippy.train(loggers=...)` asks of a logger.


class Logger(Protocol):
    """Any object with these two methods is a logger.

    If it has a method ``begin(step)`` too, that is called before the training goes on after this step: at its start, where a
    checkpoint was loaded, and after a recovery. What was logged for later steps is then logged again.

    >>> class Printer:
    ...     def log(self, step, values):
    ...         print(step, values)
    ...     def close(self):
    ...         print("closed")
    >>> from pippy import Pipe, PipelineDriver1F1B, cluster, train
    >>> import torch
    >>> pipe = Pipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), torch.nn.MSELoss())
    >>> with cluster(2, threads=1) as workers:
    ...     driver = PipelineDriver1F1B(pipe, workers)
    ...     optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    ...     data = [(torch.ones(4, 2), torch.ones(4, 1))]
    ...     result = train(driver, data, optimizer, chunks=2, steps=1, loggers=Printer())
    1 {'epoch': 0, 'loss': ..., 'learning_rate': 0.1, 'samples_per_second': ..., 'memory_mib/worker0': ..., ...}
    closed
    """

    def log(self, step: int, values: Mapping[str, Any]) -> object:
        """Note the values of a step. Values that come later for the same step are added to them."""

    def close(self) -> object:
        """The training has ended, in one way or another."""


def checked_loggers(given: Any) -> tuple[Logger, ...]:
    """The loggers that were given: one, or several.

    >>> checked_loggers("metrics.csv")
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: loggers='metrics.csv': a logger is an object with the methods log(step, values) and \
close(), and this has neither; give pippy.CSVLogger("metrics.csv"), for example
    """
    loggers = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for each in loggers:
        if isinstance(each, type):
            raise DriverError(f"loggers={each.__name__} is a class; give an object of it: {each.__name__}(...)")
        missing = [name for name in ("log", "close") if not callable(getattr(each, name, None))]
        if missing:
            has = "neither" if len(missing) == 2 else f"no {missing[0]}()"
            raise DriverError(
                f"loggers={describe(each)}: a logger is an object with the methods log(step, values) and close(), and this "
                f'has {has}; give pippy.CSVLogger("metrics.csv"), for example'
            )
    return loggers


def imported_for(logger: str, module: str, package: str) -> Any:
    """The module that a logger writes with. Raises if its package is not installed.

    >>> imported_for("CSVLogger", "no_such_module", "no-such-package")
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: CSVLogger needs the package no-such-package, and it cannot be imported here (No \
module named 'no_such_module'): pip install no-such-package; pippy.CSVLogger needs nothing
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DriverError(
            f"{logger} needs the package {package}, and it cannot be imported here ({error}): pip install {package}; "
            "pippy.CSVLogger needs nothing"
        ) from error


# Writes the numbers of a training to a CSV file.


_STEP = "step"  # the first column
_Row = dict[str, str]


class CSVLogger:
    """Writes a line for each step to the file ``path``: the step, and a column for each value.

    Each line is in the file when `log` returns. A value that comes for the first time in a later step gets a column, which is
    empty in the lines before. A training that goes on from a checkpoint goes on in the same file: the lines of later steps are
    replaced. If the file has only such lines, it is of another training, and gets another name: ``metrics-1.csv``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = CSVLogger(f"{folder}/metrics.csv")
    ...     logger.log(1, {"loss": 0.5})
    ...     logger.log(2, {"loss": 0.25, "evaluation/loss": 0.375})
    ...     logger.close()
    ...     print(open(logger.path).read())
    step,loss,evaluation/loss
    1,0.5,
    2,0.25,0.375
    <BLANKLINE>
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)) or os.path.isdir(path):
            raise DriverError(f"CSVLogger({describe(path)}): give the path of a file, as metrics.csv")
        self.path = os.fspath(path)
        self._file: BinaryIO | None = None
        self._columns = [_STEP]
        self._last: _Row = {}
        self._at = 0  # where the last line begins
        self._rows()  # raises if the file is of another kind

    def begin(self, step: int) -> None:
        """Go on after this step: lines of later ones are dropped."""
        self.close()
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        rows = self._rows()
        kept = [each for each in rows if int(each[_STEP]) <= step]
        if rows and not kept:
            os.replace(self.path, self._free_name())
        if kept:
            self._columns = list(kept[0])
        self._write_anew(kept)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a line, or add these values to the last line, if it is of this step."""
        if self._file is None:
            self.begin(step - 1)
        row = {_STEP: str(step), **{name: _text(value) for name, value in values.items()}}
        assert self._file is not None
        if self._last.get(_STEP) == row[_STEP]:
            row = {**self._last, **row}
            self._file.truncate(self._at)
        self._last = row
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self._rows()
            self._columns += new
            self._write_anew(rows)
        self._at = self._file.seek(0, os.SEEK_END)
        self._file.write(self._lines([row]))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._columns, self._last = None, [_STEP], {}

    def _rows(self) -> list[_Row]:
        """The lines of the file, without one that was not written to its end."""
        if not os.path.exists(self.path):
            return []
        with open(self.path, newline="", encoding="utf-8") as file:
            text = file.read()
        rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        if text and next(iter(rows.fieldnames or [""])) != _STEP:
            raise DriverError(
                f"{self.path} is no file of a CSVLogger, whose first column is {_STEP!r}; give the path of another file"
            )
        return list(rows)

    def _write_anew(self, rows: Iterable[_Row]) -> None:
        """Have a file with these lines. A process that dies meanwhile leaves the old one."""
        if self._file is not None:
            self._file.close()
        new = f"{self.path}.new"
        with open(new, "wb") as file:
            file.write(self._lines([dict(zip(self._columns, self._columns)), *rows]))
        os.replace(new, self.path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - until it is closed

    def _lines(self, rows: Iterable[_Row]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue().encode()

    def _free_name(self) -> str:
        name, ending = os.path.splitext(self.path)
        number = 1
        while os.path.exists(found := f"{name}-{number}{ending}"):
            number += 1
        return found


def _text(value: Any) -> str:
    """
    >>> _text(torch.tensor(0.5)), _text(0.1), _text(7), _text(None)
    ('0.5', '0.1', '7', '')
    """
    return "" if value is None else str(value.item() if isinstance(value, torch.Tensor) else value)


# Writes the numbers of a training for TensorBoard.


class TensorBoardLogger:
    """Writes scalars to a folder that ``tensorboard --logdir`` shows. It needs the package tensorboard.

    What was logged is on disk when `log` returns. A training that goes on from a checkpoint goes on in the same folder:
    TensorBoard drops what it has of later steps.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = TensorBoardLogger(folder)
    ...     logger.log(1, {"loss": 0.5})
    ...     logger.close()
    ...     len(os.listdir(folder))
    1
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(folder, (str, os.PathLike)) or os.path.isfile(folder):
            raise DriverError(f"TensorBoardLogger({describe(folder)}): give the path of a folder")
        imported_for("TensorBoardLogger", "tensorboard", "tensorboard")
        self.folder = os.fspath(folder)
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Go on after this step: TensorBoard drops later ones that were logged before."""
        from torch.utils.tensorboard import SummaryWriter  # it takes long to import

        self.close()
        self._writer = SummaryWriter(self.folder, purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a scalar for each value."""
        if self._writer is None:
            self.begin(step - 1)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


# Gives the numbers of a training to Weights & Biases.


class WandbLogger:
    """Gives values to Weights & Biases. It needs the package wandb; ``options`` are those of `wandb.init`.

    If the script has called `wandb.init` itself, its run gets the values, and stays open. With ``mode="offline"`` they are
    written to a folder, which ``wandb sync`` sends. A training that goes on from a checkpoint goes on in the same run if
    ``id=`` and ``resume="allow"`` are given. A run has each step once: steps that it has are left out.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = WandbLogger(project="demo", mode="disabled", dir=folder)
    ...     logger.log(1, {"loss": 0.5})
    ...     logger.close()
    """

    def __init__(self, **options: Any) -> None:
        self._wandb = imported_for("WandbLogger", "wandb", "wandb")
        self.options = options
        self._run: Any = None
        self._last = 0  # the last step that the run has

    def begin(self, step: int) -> None:
        """Go on after this step. Steps that the run has are left out."""
        if self._run is None:
            self._is_own = self._wandb.run is None
            self._run = self._wandb.init(**self.options) if self._is_own else self._wandb.run
            self._last = step

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Give the values of a step to the run."""
        if self._run is None:
            self.begin(step - 1)
        if step >= self._last:
            self._run.log(dict(values), step=step)
            self._last = step

    def close(self) -> None:
        """Finish the run, if it was begun here."""
        if self._run is not None and self._is_own:
            self._run.finish()
        self._run = None


# The loggers of one training: what they are given, and what becomes of one that fails.


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
        if not self._has(step) or driver.recording is not None:
            yield driver.recording if self._has(step) else None
            return
        with driver.record(limit=1) as recording:
            yield recording

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
