"""Checks the arguments of a driver: its workers, recomputed forwards, buffers, and options that exclude each other."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.slices import SlicedCalls, count_next_labels
from pippy.drivers.choice.auto import Auto
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.rewrites import MODES, Checkpoint, modes_of
from pippy.ir.base.public_calls import check_count, is_whole, refuse_words, takes_any, words_of
from pippy.ir.base.readable import brief, count_with_noun
from pippy.ir.base.trees import describe
from pippy.ir.other_graphs import sliced
from pippy.ir.pipe import Pipe, compiled_of

_DIMENSIONS = "rows are along dimension 0, and sequences along dimension 1"
_IN_ORDER = "what a worker holds is counted for one that runs its instructions in order"
_MASKED = "every micro-batch would be the whole mini-batch"
_EXCLUDED = {  # by the option: the options that it excludes, and the reason
    "slices": {
        "single_loss": "the loss over the whole mini-batch would need the outputs of all slices",
        "chunk_spec": _DIMENSIONS,
        "batch_dims": _DIMENSIONS,
        "output_spec": "outputs are joined along the rows and the sequences",
        "_debug_mask_minibatches": _MASKED,
        "compile": "stages with slices run eagerly",
        "schedule": "it is not known how long each slice takes",
    },
    "replicas": {
        "schedule": "schedule='auto' chooses for one pipeline (let it, print driver.choice, and give that schedule)",
        "single_loss": "no worker has the outputs of the whole mini-batch",
        "_debug_mask_minibatches": _MASKED,
    },
    "memory": {"out_of_order": _IN_ORDER},
    "memory_limit": {"out_of_order": _IN_ORDER},
    "single_loss": {"_debug_mask_minibatches": _MASKED},
}


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


def refuse_together(option: str, value: Any, given: Mapping[str, Any]) -> None:
    """Raise if an option of a driver, which has this value, was given with another one that excludes it.

    >>> refuse_together("replicas", 2, {"single_loss": True})
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: replicas=2 and single_loss=True cannot be combined: no worker has the outputs of \
the whole mini-batch; leave one of them out
    """
    for other, why in _EXCLUDED[option].items():
        if given.get(other):
            raise DriverError(
                f"{option}={brief(value)} and {other}={brief(given[other])} cannot be combined: {why}; leave one of them out"
            )


@dataclass
class StepSettings:
    """What a driver was told of its steps: how arguments are cut and results merged, and how long a step may take."""

    chunk_spec: Any
    batch_dims: Any
    output_spec: Any
    loss_reduction: str | Callable[..., Any] | None
    single_loss: bool
    mask: bool
    timeout: float | None


def in_slices_of(
    pipe: Pipe, slices: Any, settings: StepSettings, compile: Any, auto: Any
) -> tuple[Pipe, StepSettings, SlicedCalls | None]:
    """The Pipe that a driver with ``slices`` runs, its settings, and what divides its calls.

    Without slices these are those that are given, and None. ``auto`` is what chooses the schedule, if anything does.

    >>> from torch import nn
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> settings = StepSettings(None, None, None, None, single_loss=False, mask=False, timeout=None)
    >>> in_slices_of(pipe, 1, settings, compile=None, auto=None)[0] is pipe
    True
    >>> in_slices_of(pipe, 0, settings, compile=None, auto=None)
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: slices=0: give into how many slices each sequence is cut, 1 or more
    """
    check_count("slices", slices, "into how many slices each sequence is cut", DriverError)
    if slices == 1:
        return pipe, settings, None
    given = {
        **vars(settings),
        "_debug_mask_minibatches": settings.mask,
        "compile": compile,
        "schedule": auto and "auto",
    }
    refuse_together("slices", slices, given)
    calls = SlicedCalls(slices, compiled_of(pipe))
    counts = calls.makes_loss and settings.loss_reduction is None
    return sliced(pipe), replace(settings, loss_reduction=count_next_labels) if counts else settings, calls


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
