"""What `pippy.train(loggers=...)` asks of a logger."""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.trees import describe


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
