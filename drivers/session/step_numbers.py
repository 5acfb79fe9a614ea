"""Which steps of a run a driver's random numbers are of: a seed, and how many steps there were."""

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.trees import describe
from pippy.ir.run.random_state import RandomStep


@dataclass(frozen=True)
class StepNumbers:
    """A seed, how many steps there were that train, and how many that do not.

    Those that train are counted by themselves, so that an evaluation in between does not change their random numbers.

    >>> numbers = StepNumbers(7).after(trains=True)
    >>> numbers
    StepNumbers(seed=7, steps=1, evaluations=0)
    >>> numbers.next(trains=True)
    RandomStep(seed=7, number=1, trains=True)
    """

    seed: int
    steps: int = 0
    evaluations: int = 0

    def next(self, trains: bool) -> RandomStep:
        """The step that comes next, of those that train or of the others."""
        return RandomStep(self.seed, self.steps if trains else self.evaluations, trains)

    def after(self, trains: bool) -> "StepNumbers":
        """The numbers after that step."""
        if trains:
            return replace(self, steps=self.steps + 1)
        return replace(self, evaluations=self.evaluations + 1)

    def state(self) -> dict[str, int]:
        """As a dict."""
        return asdict(self)


def first_numbers(keyed_random: Any) -> StepNumbers | None:
    """The numbers of a new driver, from what it was given as ``keyed_random``; None if its random numbers have no key.

    >>> first_numbers(3)
    StepNumbers(seed=3, steps=0, evaluations=0)
    >>> first_numbers("yes")
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: keyed_random='yes': give a seed; or True for the seed of torch.manual_seed; or False
    """
    if isinstance(keyed_random, bool):
        return StepNumbers(torch.initial_seed()) if keyed_random else None
    try:
        return StepNumbers(operator.index(keyed_random))
    except TypeError:
        raise DriverError(
            f"keyed_random={describe(keyed_random)}: give a seed; or True for the seed of torch.manual_seed; or False"
        ) from None


def checked_numbers(state: Any, now: StepNumbers | None) -> StepNumbers | None:
    """The numbers that a state says, for a driver that has those of ``now``."""
    if now is None:
        if state is None:
            return None
        raise DriverError(
            f"random_state={describe(state)}: the random numbers of this driver have no key, since it was made with "
            "keyed_random=False; make it without that"
        )
    wanted = now.state().keys()
    fits = isinstance(state, Mapping) and state.keys() == wanted
    if not fits or not all(isinstance(each, int) and not isinstance(each, bool) for each in state.values()):
        raise DriverError(
            f"random_state={describe(state)}: give a dict of whole numbers with {', '.join(wanted)}, as driver.random_state is"
        )
    return StepNumbers(**state)
