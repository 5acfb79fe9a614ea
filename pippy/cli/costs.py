"""The options for sizes and costs, which the commands about schedules share."""

import re
from collections.abc import Callable
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import click

from pippy.ir.base.near_names import near_names

if TYPE_CHECKING:
    from pippy.drivers.plan import Costs


class CostOption(click.ParamType):
    """A number, or one for each stage, with commas between them."""

    name = "cost"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or the list of numbers."""
        if not isinstance(value, str):
            return value
        try:
            costs = [float(each) for each in value.split(",")]
        except ValueError:
            costs = [nan]
        if not all(isfinite(each) and each >= 0 for each in costs):
            self.fail(f"{value!r} is no cost; give a number of at least 0, or one for each stage: 1,2.5,1", param, ctx)
        return costs if "," in value else costs[0]


OTHER_NAMES = {"gpipe": "fill_drain", "interleaved": "interleaved_1f1b"}  # as papers call them, without punctuation


class ScheduleName(click.ParamType):
    """The name of a schedule, in any case and with any punctuation."""

    name = "schedule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name as the registry has it."""
        from pippy.drivers.plan.orders.registry import REGISTRY

        known = OTHER_NAMES | {plain(name): name for name in REGISTRY}
        if plain(value) in known:
            return known[plain(value)]
        near = near_names(plain(value), known, cutoff=0.6)
        near += [name for name in known if plain(value) and plain(value) in name and name not in near]
        hint = (
            f"Did you mean {' or '.join(known[name] for name in near)}?"
            if near
            else f"Take one of {', '.join(REGISTRY)}."
        )
        return self.fail(f"there is no schedule {value!r}. {hint}", param, ctx)


def plain(name: str) -> str:
    """A name without its punctuation.

    >>> plain("ZB-H1")
    'zbh1'
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


def with_sizes(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the numbers of workers, chunks and stages."""
    return _with(
        command,
        click.option("-p", "--workers", type=click.IntRange(1), required=True, help="How many workers."),
        click.option("-m", "--chunks", type=click.IntRange(1), required=True, help="How many micro-batches."),
        click.option("-v", "--stages-per-worker", type=click.IntRange(1), help="How many stages each worker holds."),
    )


def with_costs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the costs of computations and transfers. A single cost is for all stages of a worker together."""
    stage = "for a worker's stages together, or 1,2,… for each stage"
    return _with(
        command,
        click.option("--forward", type=CostOption(), default=1.0, help=f"Cost of a forward, {stage}.  [1]"),
        click.option(
            "--input", type=CostOption(), default=1.0, help="Of the half of a backward that others wait for.  [1]"
        ),
        click.option("--weight", type=CostOption(), default=1.0, help="Of the half for the weights.  [1]"),
        click.option("--backward", type=CostOption(), help="Of a whole backward.  [input + weight]"),
        click.option("--comm", type=float, default=0.0, help="Time from worker to worker.  [0]"),
    )


def _with(command: Callable[..., Any], *options: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def costs_of(forward: Any, input: Any, weight: Any, backward: Any, comm: float) -> "Costs":
    """The costs from the options.

    >>> costs_of(1.0, 1.0, 2.0, None, 0.5).latency
    0.5
    """
    from pippy.drivers.plan import Costs

    return Costs(forward=forward, backward_input=input, backward_weight=weight, backward=backward, latency=comm)


def share(part: Any, whole: Any) -> str:
    """A share in per cent.

    >>> share(1, 3), share(0, 0)
    ('33.3%', '0.0%')
    """
    return f"{100 * float(part) / float(whole) if whole else 0:.1f}%"
