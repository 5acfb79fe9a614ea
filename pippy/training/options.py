"""Checks the arguments of `pippy.train` before anything runs."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.driver.steps.updates import check_trains
from pippy.ir.base.checked import check_count


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
