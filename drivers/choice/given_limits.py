"""The limits that a user gives for the choice: `memory=`, `memory_limit=` and `max_live=`; and the best choice within them."""

from collections.abc import Sequence
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.plan.choice.byte_sizes import limits_of
from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.choice.limits import ActivationLimit, Limit, LiveLimit, MemoryLimit
from pippy.drivers.plan.choice.problem import Problem
from pippy.drivers.plan.choice.search import choose, search
from pippy.drivers.plan.choice.unfit import unfit
from pippy.drivers.plan.language.errors import ScheduleError
from pippy.drivers.plan.language.placement import Placement
from pippy.ir.base.brief import brief


class GivenNumbers:
    """What was given as ``name``: one number for all workers, or one for each; None stands for no limit.

    ``what`` says in an error what to give.

    >>> GivenNumbers("max_live", -1, "how many")
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

    def of_workers(self, placement: Placement) -> tuple[int, ...]:
        """The number for each worker."""
        if isinstance(self.given, int):
            return (self.given,) * placement.workers
        if len(self.given) != placement.workers:
            raise DriverError(
                f"{self} has {len(self.given)} limits for {placement.workers} workers; give one, or one each"
            )
        return tuple(self.given)


class GivenLimits:
    """The limits that were given, as limits of a problem. ``option`` is how errors name ``memory``.

    >>> limits = GivenLimits(memory="1KiB", max_live=2)
    >>> limits.on(Placement((0, 1)))
    (LiveLimit(most=(2, 2)), MemoryLimit(most=(1024, 1024)))
    """

    def __init__(
        self, memory: Any = None, memory_limit: Any = None, max_live: Any = None, option: str = "memory="
    ) -> None:
        self.memory, self.option = memory, option
        self.live = GivenNumbers("max_live", max_live, "how many stage-micro-batches each worker may hold")
        self.activations = GivenNumbers(
            "memory_limit", memory_limit, "the bytes that the activations on each worker may take"
        )

    def of_memory(self, placement: Placement) -> tuple[int, ...]:
        """The bytes of each worker, of all that it may hold."""
        return limits_of(self.memory, placement.workers, self.option)

    def on(self, placement: Placement) -> tuple[Limit, ...]:
        """The limits of the workers of a placement."""
        limits: list[Limit] = []
        if self.live.given is not None:
            limits.append(LiveLimit(self.live.of_workers(placement)))
        if self.activations.given is not None:
            limits.append(ActivationLimit(self.activations.of_workers(placement)))
        if self.memory is not None:
            limits.append(MemoryLimit(self.of_memory(placement)))
        return tuple(limits)

    def check(self, placement: Placement) -> None:
        """Raise unless the limits are for these workers, and leave room for one micro-batch in each stage."""
        for limit in self.on(placement):
            for worker, most in enumerate(limit.most if isinstance(limit, LiveLimit) else ()):
                least = len(placement.stages_of(worker))
                if most < least:
                    raise DriverError(
                        f"{self.live} leaves worker {worker} no room for one micro-batch in each of its stages; give it at "
                        f"least {least}"
                    )

    def check_weighed(self, kept: Sequence[int], placement: Placement) -> None:
        """Raise unless ``memory_limit`` leaves room for one micro-batch in each stage, which keeps so many bytes of it."""
        for worker, limit in enumerate(
            () if self.activations.given is None else self.activations.of_workers(placement)
        ):
            least = sum(kept[stage] for stage in placement.stages_of(worker))
            if least > limit:
                raise DriverError(
                    f"{self.activations} leaves worker {worker} no room for one micro-batch in each of its stages, which "
                    f"takes {least:,} bytes; raise it, or cut the mini-batch into more micro-batches"
                )

    def best(self, problem: Problem, more_chunks: Sequence[int] = (), measured: bool = True) -> Choice:
        """The best choice. If nothing keeps the limits, the error says what would, also of ``more_chunks`` micro-batches."""
        if self.memory is None:
            try:
                return choose(problem)
            except ScheduleError as error:
                raise DriverError(
                    f"{error}\nraise memory_limit or max_live, or cut the mini-batch into more micro-batches"
                ) from error
        choice = search(problem, thorough=measured, measured=measured)
        if not choice.candidates:
            raise DriverError(unfit(choice, repr(self.memory), more_chunks, self.option).message)
        return choice
