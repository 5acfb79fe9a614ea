"""The limits that a user gives for the choice: `memory=`, `memory_limit=` and `max_live=`; and the best choice within them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.count.fake_errors import UncountedError
from pippy.drivers.plan.choice.byte_sizes import limits_of
from pippy.drivers.plan.choice.candidate import MicroBatch
from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.choice.limits import Limit, LiveLimit, MemoryLimit
from pippy.drivers.plan.choice.problem import Problem
from pippy.drivers.plan.choice.search import choose, search
from pippy.drivers.plan.choice.unfit import unfit
from pippy.drivers.plan.cost.held_bytes import PipeBytes
from pippy.drivers.plan.language.errors import ScheduleError
from pippy.drivers.plan.language.placement import Placement
from pippy.ir.base.readable import brief


class GivenLimits:
    """The limits that were given, as limits of a problem.

    ``bytes`` are those of ``memory``, for all that a worker holds, or of ``memory_limit``, for activations alone; None without
    either. ``option`` is how errors name it.

    >>> limits = GivenLimits(memory="1KiB", max_live=2)
    >>> limits.on(Placement((0, 1)))
    (LiveLimit(most=(2, 2)), MemoryLimit(most=(1024, 1024)))
    """

    def __init__(self, memory: Any = None, memory_limit: Any = None, max_live: Any = None, option: str = "") -> None:
        self.of_all, self.bytes = memory_limit is None, memory if memory_limit is None else memory_limit
        self.option = option or ("memory=" if self.of_all else "memory_limit=")
        several = isinstance(max_live, Sequence) and not isinstance(max_live, str)
        self.live: Any = list(max_live) if several else max_live
        numbers = self.live if several else [] if max_live is None else [max_live]
        if (several and not numbers) or not all(
            isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in numbers
        ):
            raise DriverError(
                f"max_live={brief(max_live)}: give how many stage-micro-batches each worker may hold, one number or one for "
                "each worker"
            )

    def of_bytes(self, placement: Placement) -> tuple[int, ...]:
        """The most bytes of each worker."""
        return limits_of(self.bytes, placement.workers, self.option)

    def of_live(self, placement: Placement) -> tuple[int, ...]:
        """The most stage-micro-batches of each worker."""
        if isinstance(self.live, int):
            return (self.live,) * placement.workers
        if len(self.live) != placement.workers:
            raise DriverError(
                f"max_live={brief(self.live)} has {len(self.live)} limits for {placement.workers} workers; give one, or one "
                "each"
            )
        return tuple(self.live)

    def on(self, placement: Placement) -> tuple[Limit, ...]:
        """The limits of the workers of a placement."""
        limits: list[Limit] = []
        if self.live is not None:
            limits.append(LiveLimit(self.of_live(placement)))
        if self.bytes is not None:
            limits.append(MemoryLimit(self.of_bytes(placement)))
        return tuple(limits)

    def check(self, placement: Placement) -> None:
        """Raise unless the limits are for these workers, and leave room for one micro-batch in each stage."""
        for limit in self.on(placement):
            for worker, most in enumerate(limit.most if isinstance(limit, LiveLimit) else ()):
                least = len(placement.stages_of(worker))
                if most < least:
                    raise DriverError(
                        f"max_live={brief(self.live)} leaves worker {worker} no room for one micro-batch in each of its "
                        f"stages; give it at least {least}"
                    )

    def limited(self, sizes: PipeBytes) -> PipeBytes:
        """Of the bytes that were counted, those that are limited."""
        return sizes if self.of_all else sizes.activations

    def counted(self, estimate: Callable[[int], MicroBatch], chunks: int) -> MicroBatch:
        """What one of so many micro-batches takes, with the bytes that are limited. Raises if they cannot be counted."""
        try:
            counted = estimate(chunks)
        except UncountedError as error:
            raise UncountedError(
                error.reason,
                f"leave {self.option} out and give the number of micro-batches: then schedule='auto' chooses by time alone. "
                "max_live= limits the micro-batches that a worker holds, and driver.record(memory=True) measures their bytes",
            ) from error.__cause__
        return replace(counted, sizes=None if counted.sizes is None else self.limited(counted.sizes))

    def best(self, problem: Problem, more_chunks: Sequence[int] = (), measured: bool = True) -> Choice:
        """The best choice. If nothing keeps the limits, the error says what would, also of ``more_chunks`` micro-batches."""
        if self.bytes is None:
            try:
                return choose(problem)
            except ScheduleError as error:
                raise DriverError(f"{error}\nraise max_live") from error
        choice = search(problem, thorough=measured, measured=measured)
        if not choice.candidates:
            raise DriverError(unfit(choice, repr(self.bytes), more_chunks, self.option).message)
        return choice
