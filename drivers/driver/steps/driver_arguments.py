"""Checks the arguments of a driver: its workers, time limits, the order of work, recomputed forwards, buffers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.choice.auto import Auto
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.rewrites import MODES, Checkpoint, modes_of
from pippy.ir.base.public_calls import check_count, is_whole, refuse_words, takes_any, words_of
from pippy.ir.base.readable import brief, count_with_noun
from pippy.ir.base.trees import describe


def chosen_workers(
    there: int,
    stages: int,
    world_size: int | None,
    all_ranks: Sequence[int] | None,
    replicas: int = 1,
    gone: Collection[int] = (),
) -> list[int]:
    """The workers of a cluster that a driver uses: as many for each replica, and none of those that are ``gone``.

    >>> chosen_workers(there=4, stages=2, world_size=None, all_ranks=None)
    [0, 1]
    >>> chosen_workers(there=5, stages=2, world_size=None, all_ranks=None, replicas=2)
    [0, 1, 2, 3]
    >>> chosen_workers(there=4, stages=3, world_size=None, all_ranks=None, gone={1})
    [0, 2, 3]
    """
    check_count("replicas", replicas, "how many pipelines to run side by side", DriverError)
    chosen = _chosen(there, stages * replicas, world_size, all_ranks, gone)
    if world_size is None and all_ranks is None:
        chosen = chosen[: len(chosen) // replicas * replicas]
    if len(chosen) % replicas or not chosen:
        raise DriverError(
            f"replicas={brief(replicas)} on {count_with_noun(len(chosen) or there, 'worker')}: "
            f"every replica needs the same number of workers; give a multiple of {brief(replicas)} (world_size= or "
            "all_ranks=), or start more workers"
        )
    return chosen


def checked_ranks(name: str, given: Any, there: int) -> list[int]:
    """The workers that are given by their numbers, as the argument ``name``."""
    ranks = list(given) if isinstance(given, Iterable) else [given]
    wrong = [rank for rank in ranks if not (isinstance(rank, int) and 0 <= rank < there)]
    if wrong or len(set(ranks)) != len(ranks) or not ranks:
        raise DriverError(f"{name}={brief(ranks)}: name workers of the cluster, 0 to {there - 1}, each once")
    return ranks


def _chosen(
    there: int, stages: int, world_size: int | None, all_ranks: Sequence[int] | None, gone: Collection[int]
) -> list[int]:
    present = [rank for rank in range(there) if rank not in gone]
    if all_ranks is not None:
        ranks = checked_ranks("all_ranks", all_ranks, there)
        lost = [rank for rank in ranks if rank in gone]
        if lost:
            raise DriverError(
                f"all_ranks={brief(ranks)}: worker {', '.join(map(str, lost))} was lost, and has no process; name others, of "
                f"{', '.join(map(str, present))}"
            )
        if world_size is not None and world_size != len(ranks):
            raise DriverError(f"world_size={brief(world_size)} and all_ranks={brief(ranks)} disagree; give one of them")
        return ranks
    if world_size is None:
        return present[:stages]
    if not isinstance(world_size, int) or not 0 < world_size <= len(present):
        raise DriverError(
            f"world_size={brief(world_size)}: the cluster has {len(present)} workers; ask for 1 to {len(present)}"
        )
    return present[:world_size]


def checked_out_of_order(out_of_order: Any) -> bool | int:
    """The number of micro-batches that a worker may hold if it runs out of order."""
    if isinstance(out_of_order, bool) or is_whole(out_of_order):
        return out_of_order
    raise DriverError(
        f"out_of_order={describe(out_of_order)}: give True to hold no more micro-batches than the schedule does, or the most "
        "that a worker may hold"
    )


def checked_checkpoint(checkpoint: Any, stages: int) -> Checkpoint:
    """The checked argument ``checkpoint``: which forwards are computed again."""
    if not isinstance(checkpoint, (str, Mapping)):
        raise ArgumentError(
            f"checkpoint={brief(checkpoint)} is no mode; take one of {', '.join(map(repr, MODES))}, or a dict of stage "
            "to mode"
        )
    modes_of(checkpoint, stages)
    return checkpoint


def checked_buffers(buffers: Any) -> str | None:
    """The checked argument ``buffers``: how buffers change that forward changes by the rows of a micro-batch."""
    if buffers is None or buffers == "per_microbatch":
        return buffers
    raise DriverError(
        f"buffers={describe(buffers)}: with 'per_microbatch', each micro-batch changes the buffers that forward "
        "changes. Give that, or leave buffers= out: then a step is refused if this differs from the plain model"
    )


def check_replicated(replicas: int, *, auto: bool, single_loss: bool, mask: bool) -> None:
    """Raise if an argument cannot be used with replicas."""
    with_replicas = f"replicas={replicas} and"
    if auto:
        raise DriverError(
            f"{with_replicas} schedule='auto' cannot be combined; let schedule='auto' choose for one pipeline, print "
            "driver.choice, and give that schedule"
        )
    if single_loss:
        raise DriverError(
            f"{with_replicas} single_loss=True cannot be combined, because no worker has the outputs of the whole "
            "mini-batch; leave one of them out"
        )
    if mask:
        raise DriverError(f"{with_replicas} _debug_mask_minibatches=True cannot be combined; leave one of them out")


def check_chunks(chunks: Any, auto: Auto | None) -> None:
    """Raise unless this is a number of micro-batches, or None where the driver chooses it."""
    if chunks is None and auto is not None and auto.counts_bytes:
        return
    if not is_whole(chunks):
        chooses = "; schedule='auto' with memory= chooses it for None" if chunks is None else ""
        raise DriverError(
            f"chunks={describe(chunks)}: give the number of micro-batches first, as in driver.run(4, x, target){chooses}"
        )


def check_options(driver: type, schedule: object, options: Mapping[str, Any]) -> None:
    """Raise if an argument is neither the driver's nor an option of its schedule, and it is known what to give instead."""
    taken = {"stages_per_worker", "placement"}
    if isinstance(schedule, str) and schedule in REGISTRY:
        order = REGISTRY[schedule].schedule
        if takes_any(order):
            return
        taken |= set(list(signature(order).parameters)[2:])  # after the placement and the chunks
    accepted = [*words_of(*(vars(each)["__init__"] for each in driver.__mro__ if "__init__" in vars(each))), *taken]
    others = {name: value for name, value in options.items() if name not in taken}
    refuse_words(driver.__name__, others, [each for each in accepted if each not in others], unless_known=True)
