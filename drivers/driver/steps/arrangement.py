"""Which workers of a cluster run the stages of a driver, and by which schedule: at first, and after a recovery."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.driver.steps.driver_arguments import checked_ranks, refuse_together
from pippy.drivers.driver.steps.programs import RequestedSchedule, check_single_loss
from pippy.drivers.lowering.flow import loss_stage
from pippy.drivers.plan import Program
from pippy.drivers.plan.language.errors import ScheduleError
from pippy.drivers.plan.language.placement import Placement
from pippy.ir.base.public_calls import check_count, check_flag
from pippy.ir.base.readable import brief
from pippy.ir.record.compiled import Compiled


@dataclass(frozen=True)
class Arrangement:
    """The workers ``ranks`` run the stages by a schedule, those of each replica after those of the one before it.

    ``placement`` is that of one replica.

    >>> arrangement = Arrangement.of(RequestedSchedule("1f1b", {}, stages=3, replicas=2), [0, 1, 2, 4])
    >>> arrangement.replicas
    [[0, 0, 1], [2, 2, 4]]
    """

    schedule: RequestedSchedule
    placement: Placement
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, schedule: RequestedSchedule, chosen: Sequence[int]) -> "Arrangement":
        """That of a schedule on these workers, or on the first of them, if it uses fewer."""
        placement = schedule.example(chunks=1, workers=len(chosen) // schedule.replicas).placement
        return cls(schedule, placement, tuple(chosen[: placement.workers * schedule.replicas]))

    @property
    def pipelines(self) -> list[tuple[int, ...]]:
        """The workers of each replica."""
        size = self.placement.workers
        return [self.ranks[at : at + size] for at in range(0, len(self.ranks), size)]

    @property
    def replicas(self) -> list[list[int]]:
        """The worker of each stage, for each replica."""
        return [[ranks[worker] for worker in self.placement.worker_of] for ranks in self.pipelines]


@dataclass(frozen=True)
class WorkersToGoOnWith:
    """How many workers a recovery goes on with, or which, in how many replicas. Without both, as many as before.

    >>> now = Arrangement.of(RequestedSchedule("1f1b", {}, stages=2, replicas=2), [0, 1, 2, 3])
    >>> WorkersToGoOnWith(replicas=1).chosen(now, own=[0, 1, 2, 3], lost={1})
    [2, 3]
    >>> WorkersToGoOnWith(workers=1, replicas=1).chosen(now, own=[0, 1, 2, 3], lost={0})
    [2]
    """

    workers: int | Sequence[int] | None = None
    replicas: int | None = None

    def check(self, there: int) -> None:
        """Raise if they are no numbers, or name no workers of a cluster with so many."""
        check_count("replicas", self.replicas, "how many to go on with", DriverError, none="for as many as there are")
        if self.workers is None or isinstance(self.workers, int):
            check_count("workers", self.workers, "how many to go on with", DriverError, none="for those that there are")
        else:
            checked_ranks("workers", self.workers, there)

    def count_of_replicas(self, now: Arrangement) -> int:
        """How many replicas there will be."""
        return now.schedule.replicas if self.replicas is None else self.replicas

    def chosen(self, now: Arrangement, own: Sequence[int], lost: Collection[int]) -> list[int]:
        """The workers, of the driver's ``own``: those of whole replicas first, then others that are there, then lost ones."""
        replicas = self.count_of_replicas(now)
        if self.workers is None:
            count = now.placement.workers * replicas
        else:
            count = self.workers if isinstance(self.workers, int) else len(self.workers)
        if count % replicas:
            raise DriverError(
                f"workers={brief(self.workers)} in {replicas} replicas: every replica needs the same number of workers; give "
                f"a multiple of {replicas}, or replicas="
            )
        if self.workers is not None and not isinstance(self.workers, int):
            return list(self.workers)
        if count > len(own):
            raise DriverError(
                f"{count} workers are asked for, and the driver was made for {len(own)}; name all that it is to use: "
                "workers=[0, 1, ...]"
            )
        whole = [ranks for ranks in now.pipelines if not set(ranks).intersection(lost)]
        there = [rank for rank in (*now.ranks, *own) if rank not in lost]
        found = list(dict.fromkeys(chain(*whole, there, own)))[:count]
        if replicas == now.schedule.replicas and set(found) == set(now.ranks):
            return list(now.ranks)
        return found if replicas > 1 else sorted(found, key=list(own).index)


class Arrangements:
    """Those that one driver can have: it is made for ``first``, on the workers ``chosen``, and recoveries choose others.

    ``single_loss`` and ``mask`` are what the driver was given.
    """

    def __init__(
        self, compiled: Compiled, schedule: RequestedSchedule, chosen: Sequence[int], single_loss: bool, mask: bool
    ) -> None:
        self.compiled, self.single_loss, self.mask = compiled, single_loss, mask
        self.requested, self.own = schedule, list(chosen)
        self.first = self._checked(schedule, chosen)

    def _checked(self, schedule: RequestedSchedule, chosen: Sequence[int]) -> Arrangement:
        """That of a schedule on these workers. Raises if they cannot run the stages by it."""
        auto, replicas, stages = schedule.auto, schedule.replicas, self.compiled.num_stages
        given = {"schedule": auto and "auto", "single_loss": self.single_loss, "_debug_mask_minibatches": self.mask}
        if replicas > 1:
            refuse_together("replicas", replicas, given)
        if self.single_loss:
            refuse_together("single_loss", True, given)
        arrangement = Arrangement.of(schedule, chosen)
        placement = arrangement.placement
        if placement.stages != stages:
            raise DriverError(
                f"the {'placement' if isinstance(schedule.schedule, str) else 'program'} is for {placement.stages} stages, "
                f"and the Pipe has {stages}; give each of them a worker"
            )
        if auto is not None:
            auto.limits.on(placement)
        if self.single_loss:
            example = schedule.example(chunks=3, workers=placement.workers)
            check_single_loss(example, loss_stage(self.compiled))
        return arrangement

    def next(
        self, now: Arrangement, asked: WorkersToGoOnWith, schedule: str | Program | None, lost: Collection[int]
    ) -> tuple[Arrangement, str]:
        """What a recovery goes on with, by another schedule, if one is given; and a warning, if the driver's own cannot be."""
        chosen = asked.chosen(now, self.own, lost)
        requested = replace(self.requested, replicas=asked.count_of_replicas(now))
        if schedule == "auto":
            raise DriverError(
                "schedule='auto' is for a new driver; leave schedule= out to go on with the driver's own, or give another"
            )
        if schedule is not None:
            return self._checked(replace(requested, schedule=schedule, options={}, auto=None), chosen), ""
        try:
            return self._checked(requested, chosen), ""
        except (DriverError, ScheduleError) as error:
            if requested.auto is not None:
                raise DriverError(f"{error}. Give recover() another schedule=, as in schedule='1f1b'") from error
            simple = "fill_drain" if self.single_loss else "1f1b"
            warning = f"the run goes on with schedule={simple!r}, because the driver's own cannot run on these workers: {error}"
            return self._checked(replace(requested, schedule=simple, options={}), chosen), warning

    def left(self, now: Arrangement, lost: Collection[int]) -> WorkersToGoOnWith:
        """As many replicas as can be made of the workers that are left; or one pipeline on all of them."""
        left = len([rank for rank in self.own if rank not in lost])
        replicas = left // now.placement.workers if now.schedule.replicas > 1 else 0
        if not left:
            raise DriverError("none of the driver's workers is left; open another cluster, and driver.load() there")
        return (
            WorkersToGoOnWith(replicas=min(replicas, now.schedule.replicas)) if replicas else WorkersToGoOnWith(left, 1)
        )

    def note(self, now: Arrangement, schedule: str | Program | None) -> None:
        """The driver has gone on, by this schedule, if one was given: it and the workers are its own from now on."""
        self.requested = self.requested if schedule is None else now.schedule
        self.own = list(dict.fromkeys([*self.own, *now.ranks]))


def check_fewer(fewer: Any, workers: Any = None, replicas: Any = None) -> None:
    """Raise unless ``fewer`` is True or False, and True without a number of workers or replicas."""
    check_flag("fewer", fewer, DriverError, true="to go on with fewer workers if none can be started")
    if fewer and (workers is not None or replicas is not None):
        raise DriverError(
            "fewer=True goes on with as many workers as can be had, and workers= or replicas= says how many; give one of them"
        )
