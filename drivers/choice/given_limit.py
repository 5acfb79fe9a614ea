"""A limit that the user gives for the workers: one number for all of them, or one for each."""

from collections.abc import Sequence
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.plan.language.placement import Placement
from pippy.ir.base.brief import brief


class GivenLimit:
    """What was given as ``name``; None means that there is no limit. ``what`` says in an error what to give.

    >>> GivenLimit("max_live", -1, "how many")
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: max_live=-1: give how many, one number or one for each worker
    """

    def __init__(self, name: str, given: Any, what: str) -> None:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        numbers = list(given) if several else [] if given is None else [given]
        if (several and not numbers) or not all(
            isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in numbers
        ):
            raise DriverError(f"{name}={brief(given)}: give {what}, one number or one for each worker")
        self.name, self.given = name, numbers if several else given

    def __str__(self) -> str:
        return f"{self.name}={brief(self.given)}"

    def of_workers(self, placement: Placement) -> tuple[int, ...] | None:
        """The limit of each worker."""
        if self.given is None:
            return None
        if isinstance(self.given, int):
            return (self.given,) * placement.workers
        if len(self.given) != placement.workers:
            raise DriverError(
                f"{self} has {len(self.given)} limits for {placement.workers} workers; give one, or one each"
            )
        return tuple(self.given)
