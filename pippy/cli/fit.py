"""`pippy fit`: how to run a model in so many bytes on each worker: schedule, micro-batches, forwards computed again."""

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pippy.cli.problems import hint_at, plain_warnings
from pippy.cli.show import Target, pipe_options
from pippy.ir.base.errors import PippyError

if TYPE_CHECKING:
    import torch

    from pippy.drivers.choice.given_limits import DividedCall
    from pippy.drivers.plan import Program
    from pippy.ir.pipe import Pipe


@click.command(no_args_is_help=True, short_help="Find what fits into the memory of the workers.")
@click.argument("target")
@click.option("--memory", "memory", required=True, help="Bytes of each worker: 12GiB, or one for each: 12GiB,8GiB.")
@click.option("-p", "--workers", type=click.IntRange(1), required=True, help="How many workers.")
@click.option(
    "--input", "inputs", multiple=True, required=True, metavar="[NAME=]DTYPE[SIZES]", help="An input, the target too."
)
@click.option("-m", "--chunks", type=click.IntRange(1), help="How many micro-batches.  [the fastest that fits]")
@click.option("--optimizer", metavar="NAME", help="A class of torch.optim, as in AdamW.  [no state]")
@click.option("--checkpoint", type=click.Choice(["always", "except_last", "never"]), help="For all stages.  [chosen]")
@pipe_options
def fit(
    target: str,
    memory: str,
    workers: int,
    inputs: tuple[str, ...],
    chunks: int | None,
    optimizer: str | None,
    checkpoint: str | None,
    **how: Any,
) -> None:
    """Find how a step of training fits into the memory of each worker: schedule, micro-batches, forwards to compute again.

    TARGET is as for `pippy show`. The inputs have the sizes of the whole mini-batch; the last one is the target of the loss.
    Nothing is computed: bytes are counted with fake tensors, and times are guessed from FLOPs, so only their order tells. A
    driver with schedule="auto" and memory= measures them.

    \b
    Examples:
      pippy fit model.py:Net --memory 12GiB -p 4 --loss MSELoss --input 'float32[64,16]' --input 'float32[64,1]'
      pippy fit gpt2.py:model --memory 8GiB -p 2 -m 8 --optimizer AdamW --input 'input_ids=int64[32,128]' ...
    """
    import torch

    from pippy.drivers.batch.divide_call import divide_call
    from pippy.drivers.choice.given_limits import GivenLimits, call_to_fit, counts_of_chunks
    from pippy.drivers.count.optimizer_bytes import counted_optimizer
    from pippy.drivers.plan.choice.problem import Problem
    from pippy.ir.pipe import compiled_of

    given = Target(target, inputs, **how)
    args, kwargs = given.example
    with plain_warnings():
        pipe = _training_pipe(given, workers)
        compiled = compiled_of(pipe)
        call = call_to_fit(
            pipe,
            (args, kwargs),
            lambda count: divide_call(compiled, count, args, kwargs),
            torch.device("cpu"),
            [counted_optimizer(_optimizer(optimizer))] if optimizer else [],
        )
        limits = GivenLimits(memory.split(",") if "," in memory else memory, option="--memory ")
        counts = [chunks] if chunks else _counts_that_run(call, counts_of_chunks(_rows(call)))
        plain = _plain(pipe, workers)
        problem = Problem(plain, call.estimate, tuple(counts), limits.on(plain.placement), checkpoint)
        choice = limits.best(problem, call.counts_above(max(counts)), measured=False)
    click.echo(str(choice))


def _rows(call: "DividedCall") -> int:
    if call.rows is None:
        raise click.ClickException(
            "without -m, the rows of the inputs are cut into micro-batches, and these have no rows, or not all as many; give "
            "all of them as many in their first dimension, or -m 1"
        )
    return call.rows


def _counts_that_run(call: "DividedCall", counts: Sequence[int]) -> list[int]:
    """Those of some numbers of micro-batches in which the model can be run; which others were tried is said."""
    refused: dict[int, PippyError] = {}
    for count in counts:
        try:
            call.estimate(count)
        except PippyError as error:
            refused[count] = error
    if refused:
        tried = ", ".join(map(str, refused))
        reason = next(iter(refused.values()))
        told = (
            f"without -m, numbers of micro-batches are tried; the model cannot be run in {tried}, whose micro-batches have "
            f"other sizes than --input says: {reason}"
        )
        if len(refused) == len(counts):
            raise click.ClickException(told)
        click.echo(f"Warning: {told}", err=True)
    return [count for count in counts if count not in refused]


def _training_pipe(target: Target, workers: int) -> "Pipe":
    from pippy.ir.pipe import compiled_of

    by_hand = bool(target.num_stages or target.split or target.sequential)
    with warnings.catch_warnings():
        if not by_hand:  # of a model that has no mark, which is then cut here
            warnings.simplefilter("ignore")
        pipe = target.pipe()
    if not by_hand and compiled_of(pipe).num_stages == 1 < workers:
        pipe = replace(target, num_stages=workers).pipe()
    stages_made = compiled_of(pipe).num_stages
    if stages_made < workers:
        raise click.ClickException(
            f"{target.name} has {stages_made} stages for {workers} workers; give --num-stages {workers}, or fewer workers"
        )
    if compiled_of(pipe).loss is None:
        raise click.ClickException(
            f"{target.name} has no loss, and what fits is a step of training; give --loss MSELoss"
        )
    return pipe


def _plain(pipe: "Pipe", workers: int) -> "Program":
    from pippy.drivers.choice.auto import auto_placement
    from pippy.drivers.lowering.lower import lower
    from pippy.drivers.plan import make_schedule
    from pippy.ir.pipe import compiled_of

    stages = compiled_of(pipe).num_stages
    per_worker = [stages // workers + (worker < stages % workers) for worker in range(workers)]
    schedule = make_schedule("1f1b", workers=workers, chunks=1, **auto_placement({}, per_worker))
    return lower(pipe, schedule).program


def _optimizer(name: str) -> "type[torch.optim.Optimizer]":
    import torch

    optimizer, every = torch.optim.Optimizer, filter(inspect.isclass, vars(torch.optim).values())
    known = {each.__name__: each for each in every if issubclass(each, optimizer) and each is not optimizer}
    title = {each.lower(): each for each in known}.get(name.lower())
    if title is not None:
        return known[title]
    raise click.BadParameter(f"torch.optim has no {name!r}; {hint_at(name, sorted(known))}", param_hint="--optimizer")
